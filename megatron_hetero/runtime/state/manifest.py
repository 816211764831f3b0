"""The manifest of a checkpoint: its files with their sizes and SHA-256, written last of all.

A folder has a manifest only if everything in it was complete before.  Each rank takes the digests
of the files that it wrote, while they are still in memory; rank 0 puts them together.  A digest in
the same folder proves that the files are what was written, not who wrote them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_hetero.errors import CheckpointError
from megatron_hetero.files import content_hash, read_json, validate_document, write_json

MANIFEST = "megatron-hetero-manifest.json"
_DIGESTS = ".digests"
_READ_BY_NAME = (".metadata", "common.pt", "integrity.json", "metadata.json")
_FORMAT: Literal[1] = 1


class FileDigest(BaseModel):
    """The size (bytes) and the SHA-256 (hex) of a file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Digests(BaseModel):
    """Digests of a rank's files."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    files: dict[str, FileDigest]


class _ManifestFile(BaseModel):
    """The manifest as it lies in the folder; `sha256` is of all the rest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    format: Literal[1]
    step: int = Field(ge=0)
    plan: str | None = Field(pattern="^[0-9a-f]{64}$")
    num_ranks: int = Field(ge=1)
    files: dict[str, FileDigest]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint of `step`, written by `num_ranks` ranks.

    `plan` is the hash of the plan that it was written under; None without a plan.  `files` are all
    files of the folder but the manifest, by name.
    """

    step: int
    plan: str | None
    num_ranks: int
    files: Mapping[str, FileDigest]


def digest_of(path: Path) -> FileDigest:
    """The digest of a file as it is.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(size=file.tell(), sha256=digest)


def write_digests(folder: Path, rank: int, names: Iterable[str]) -> None:
    """Leave the digests of `names`, files just written by `rank`, in a folder inside: the manifest
    of Megatron's own (`--verify-integrity`) has all files beside the data, and these go later.

    Raises:
        OSError: a file cannot be read.
        FileFormatError: the digests cannot be written.
    """
    files = {name: digest_of(folder / name).model_dump() for name in names}
    notes = folder / _DIGESTS
    notes.mkdir(exist_ok=True)
    write_json(notes / f"{rank}.json", {"files": files})


def write_manifest(folder: Path, step: int, plan: str | None, num_ranks: int) -> None:
    """Combine the digests of all ranks, and digest the files without (rank 0's own).

    Raises:
        CheckpointError: a file is not as long as when its rank wrote it, or has no digest.
        FileFormatError, OSError: the folder cannot be read or written.
    """
    # Digests that every rank took while it wrote; their notes go.
    files: dict[str, FileDigest] = {}
    notes = folder / _DIGESTS
    if notes.is_dir():
        for note in sorted(notes.glob("*.json")):
            files |= validate_document(read_json(note), _Digests, CheckpointError).files
        shutil.rmtree(notes)
    # Every file has a digest, and still its length; rank 0's own files are digested now.
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        if path.name in files:
            if path.stat().st_size != files[path.name].size:
                raise CheckpointError(f"{path}: changed while the checkpoint was written")
        elif path.suffix == ".distcp":
            raise CheckpointError(f"{path}: the rank that wrote it left no digest")
        else:
            files[path.name] = digest_of(path)
    # The manifest's own hash covers everything in it.
    content = {
        "format": _FORMAT,
        "step": step,
        "plan": plan,
        "num_ranks": num_ranks,
        "files": {name: digest.model_dump() for name, digest in files.items()},
    }
    write_json(folder / MANIFEST, {**content, "sha256": content_hash(content)})


def has_manifest(folder: Path) -> bool:
    """True where a save was complete; other checkpoints are stock Megatron's or no checkpoints."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        FileFormatError: it is damaged, or of a newer format, or names files outside of the folder.
    """
    path = folder / MANIFEST
    document = read_json(path)
    found = validate_document(document, _ManifestFile, CheckpointError)
    content = {key: value for key, value in document.data.items() if key != "sha256"}
    if content_hash(content) != found.sha256:
        raise CheckpointError(f"{path}: damaged: its own SHA-256 is another than it says")
    for name in found.files:
        # A path in the place of a name could lead out of the folder.
        if Path(name).name != name:
            raise CheckpointError(f"{path}: {name!r} is no name of a file in the folder")
    return Manifest(found.step, found.plan, found.num_ranks, found.files)


def faults_of(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[str]:
    """What is not as the manifest says, of the files `names`: one line for each.

    Sizes come first, so that a truncated file costs nothing.
    """
    for name in names:
        path, wanted = folder / name, manifest.files[name]
        try:
            if path.is_symlink() or not path.is_file():
                yield f"{name}: missing, or no regular file"
            elif path.stat().st_size != wanted.size:
                yield f"{name}: {path.stat().st_size} bytes, written were {wanted.size}"
            elif digest_of(path) != wanted:
                yield f"{name}: its bytes changed (another SHA-256 than when it was written)"
        except OSError as error:
            yield f"{name}: cannot be read: {error.strerror}"


def strangers_in(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the files read by Megatron by name but absent from the complete checkpoint.

    Other files beside it (notes, a tokenizer) are read by nobody.
    """
    for name in _READ_BY_NAME:
        if name not in manifest.files and os.path.lexists(folder / name):
            yield f"{name}: not of this checkpoint; move it elsewhere"
