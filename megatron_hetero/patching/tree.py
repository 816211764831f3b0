"""A Megatron-LM source tree and its patch.

The sha256 of the file that the patch changes identifies a tree: as it is, or with the patch taken
out. An unknown tree is left untouched, and reverting restores the original bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

import megatron_hetero
from megatron_hetero.errors import FileFormatError, MegatronVersionError, UsageError
from megatron_hetero.model.megatron_release import RELEASE
from megatron_hetero.patching.unified_diff import Hunk, apply_hunks, first_difference, hunks_of

_MAX_QUOTED = 72

State = Literal["unpatched", "patched"]


class Release(BaseModel):
    """One entry of `patches/releases.json`: a release, and the hashes of its file and its patch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: str
    carried_by: str
    file: str
    patch: str
    sha256: str
    patch_sha256: str


@dataclass(frozen=True)
class SourceTree:
    """A recognised source tree."""

    root: Path
    release: Release
    state: State

    @property
    def path(self) -> Path:
        """Return the file that the patch changes."""
        return self.root / self.release.file


def patches_folder() -> Path:
    """Return `patches/`: beside the package in a checkout, within it once installed."""
    package = Path(megatron_hetero.__file__).parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def releases() -> tuple[Release, ...]:
    """Return every release that has a patch."""
    text = (patches_folder() / "releases.json").read_text(encoding="utf-8")
    return tuple(TypeAdapter(list[Release]).validate_json(text))


def recognise(root: Path) -> SourceTree:
    """Find the release of a source tree, and its state: patched or not.

    Raises:
        UsageError: `root` is not a folder.
        MegatronVersionError: no known tree has these files; the message says what was found.
    """
    if not root.is_dir():
        raise UsageError(f"{root}: not a folder. Give the root of a Megatron-LM checkout.")
    known = releases()
    # What the message says of an unknown tree: files found, and the nearest known lines.
    found: list[str] = []
    edits: list[str] = []
    for name in sorted({release.file for release in known}):
        path = root / name
        if not path.is_file():
            found.append(f"no {name}")
            continue
        data = path.read_bytes()
        digest = _sha256(data)
        # The hash alone decides: names and version numbers do not tell an edited file.
        for release in known:
            if release.file == name and digest == release.sha256:
                return SourceTree(root, release, "unpatched")
            if release.file == name and _is_patched(data, release):
                return SourceTree(root, release, "patched")
        found.append(f"{name} with the unknown sha256 {digest}")
        edits += _edits(path, data, [release for release in known if release.file == name])
    version = megatron_core_version(root)
    found.append(f"megatron-core {version}" if version else "no megatron/core/package_info.py")
    raise MegatronVersionError(
        f"{root} is none of the Megatron-LM trees that there is a patch for: it has "
        f"{', '.join(found)}. Nothing was changed.\n"
        + "".join(f"  {edit}\n" for edit in edits)
        + "".join(f"  known: {release.carried_by}\n" for release in known)
        + _what_to_do(root, version)
    )


def _what_to_do(root: Path, version: str | None) -> str:
    """Return the advice for an unknown tree: nothing that could not work with what is there.

    It names `megatron_hetero.launch` only if the tree has the script, and the runtime works with
    the tree's own Megatron core.
    """
    has_script = (root / "pretrain_gpt.py").is_file()
    # Neither sign of Megatron: most likely the wrong folder.
    if version is None and not has_script:
        return (
            "This is no Megatron-LM checkout: give the root of one, the folder with "
            "pretrain_gpt.py and megatron/. Without any, `-m megatron_hetero.pretrain_gpt` trains, "
            "as the lines of `megatron-hetero flags` do"
        )
    checkout = "check one of these commits out (undo your own changes of that file first)."
    # The runtime needs Megatron core of its own release, so that no patch would help.
    if version is not None and not version.startswith(f"{RELEASE}."):
        return f"The runtime does not work with megatron-core {version}, patched or not: {checkout}"
    if not has_script:
        return (
            "Without that script there is nothing to patch: `-m megatron_hetero.pretrain_gpt` "
            f"trains in its place; or {checkout}"
        )
    return (
        "Use `python -m megatron_hetero.launch pretrain_gpt.py …`, which needs no patch, or "
        + checkout
    )


def _edits(path: Path, data: bytes, known: Sequence[Release]) -> Iterator[str]:
    """Yield, for each known release, the first line that the patch does not find as expected.

    Where the patch finds all its lines, the text says that other lines of the file are edited.
    """
    text = data.decode("utf-8", errors="replace")
    for release in known:
        if _sha256(data.replace(b"\r\n", b"\n")) == release.sha256:
            yield (
                f"{path}: that of {release.release} with the line ends of Windows (CRLF): check it "
                "out again after `git config core.autocrlf input`"
            )
            continue
        # The first hunk whose lines the file does not have says where it was edited.
        hunks = hunks_of(patch_text(release), release.patch)
        missed = next((m for hunk in hunks if (m := first_difference(text, hunk))), None)
        if missed is None:
            yield (
                f"{path}: beside {release.release}: the lines that the patch changes are as they "
                "were, other lines are edited: `git diff` in the tree shows which"
            )
            continue
        number, expected, found = missed
        yield (
            f"{path}:{number}: beside {release.release}: it has {_quoted(found)} where the patch "
            f"expects {_quoted(expected)}"
        )


def _quoted(line: str | None) -> str:
    return "the end of the file" if line is None else repr(line.strip()[:_MAX_QUOTED])


def megatron_core_version(root: Path) -> str | None:
    """Read Megatron core's version from a tree's text, without running it; None if absent."""
    path = root / "megatron" / "core" / "package_info.py"
    if not path.is_file():
        return None
    # Three plain assignments; the tree's code is not run.
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", path.read_text("utf-8"), re.M))
    return ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def apply(tree: SourceTree) -> None:
    """Put the hook into the tree.

    Raises:
        UsageError: the tree has it already.
        FileFormatError: the file cannot be written.
    """
    if tree.state == "patched":
        raise UsageError(f"{tree.path} is patched already; nothing was changed")
    _rewrite(tree, backwards=False)


def revert(tree: SourceTree) -> None:
    """Take the hook out: the file gets its original bytes back.

    Raises:
        UsageError: the tree does not have it.
        FileFormatError: the file cannot be written.
    """
    if tree.state == "unpatched":
        raise UsageError(f"{tree.path} is not patched; nothing was changed")
    _rewrite(tree, backwards=True)


def patch_text(release: Release) -> str:
    """Read the patch of a release.

    Raises:
        FileFormatError: it is not the patch that the release names.
    """
    data = (patches_folder() / release.patch).read_bytes()
    if _sha256(data) != release.patch_sha256:
        raise FileFormatError(
            f"{release.patch} is not the patch of {release.release}; nothing was changed. "
            "The installation of megatron-hetero is damaged: install it again."
        )
    return data.decode("utf-8")


def _is_patched(data: bytes, release: Release) -> bool:
    """Return whether a file without the patch of a release is the release's file."""
    hunks = _hunks(release, backwards=True)
    try:
        return _sha256(_changed(data, hunks, release.file)) == release.sha256
    except (FileFormatError, UnicodeDecodeError):  # it has not the lines of the patch
        return False


def _hunks(release: Release, *, backwards: bool) -> tuple[Hunk, ...]:
    # One patch serves both directions.
    hunks = hunks_of(patch_text(release), release.patch)
    return tuple(hunk.reversed for hunk in hunks) if backwards else hunks


def _changed(data: bytes, hunks: tuple[Hunk, ...], name: str) -> bytes:
    return apply_hunks(data.decode("utf-8"), hunks, name).encode("utf-8")


def _rewrite(tree: SourceTree, *, backwards: bool) -> None:
    release = tree.release
    before = tree.path.read_bytes()
    after = _changed(before, _hunks(release, backwards=backwards), str(tree.path))
    # Before anything is written: one side has to be the release's own file, byte for byte.
    if _sha256(after if backwards else before) != release.sha256:
        raise FileFormatError(f"{tree.path} changed just now; nothing was written. Try again.")
    # The new file replaces the old one in one step, with its mode; a link to it stays a link.
    target = Path(os.path.realpath(tree.path))
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_bytes(after)
        shutil.copymode(target, beside)
        os.replace(beside, target)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise FileFormatError(
            f"{tree.path}: cannot be written: {error.strerror}. Nothing was changed."
        ) from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
