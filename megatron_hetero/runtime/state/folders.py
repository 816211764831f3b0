"""The folders of a job's checkpoints, so that each name holds a whole checkpoint or none.

    iter_0000020             published: complete, with its manifest
    .saving-iter_0000020     being written
    .replaced-iter_0000020   an earlier one of the same step, until the newer one has its name
    .deleted-iter_0000020    no longer kept; being removed

Whatever instant a job ends at, the published folders are whole.  Leftovers are removed by the next
job that saves there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_hetero.runtime.state.manifest import has_manifest

TRACKER = "latest_checkpointed_iteration.txt"
_SAVING, _REPLACED, _DELETED = ".saving-", ".replaced-", ".deleted-"
_STEP = re.compile(r"iter_(\d{7,})")


def working_folder(final: Path) -> Path:
    """The folder in which the checkpoint `final` is written."""
    return final.with_name(_SAVING + final.name)


def step_folder(folder: Path, step: int) -> Path:
    """Megatron's name for the checkpoint of a step."""
    return folder / f"iter_{step:07d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps with a manifest, newest first."""
    found = []
    for path in folder.iterdir():
        name = _STEP.fullmatch(path.name)
        if name and path.is_dir() and has_manifest(path):
            found.append(int(name[1]))
    return sorted(found, reverse=True)


def begin(working: Path) -> None:
    """Make an empty working folder in which a file can be written.

    Raises:
        OSError: it cannot be made, or nothing can be written in it.
    """
    working.parent.mkdir(parents=True, exist_ok=True)
    if working.exists():
        shutil.rmtree(working)
    working.mkdir()
    # A disk that is full or cannot be written shows before any rank has begun.
    probe = working / ".probe"
    probe.write_bytes(b"\0" * 4096)
    sync(probe)
    probe.unlink()


def publish(working: Path, final: Path) -> None:
    """Give a complete working folder the final name, in an atomic rename.

    Raises:
        OSError: a folder cannot be renamed or synced.
    """
    # The data are on the disk before the name says that they are complete.
    sync(working)
    replaced = final.with_name(_REPLACED + final.name)
    # An older checkpoint of the same step keeps its data until the newer one has the name.
    if final.is_dir() and any(final.iterdir()):
        final.rename(replaced)
    working.rename(final)
    sync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def abandon(working: Path) -> None:
    """Remove a working folder that will not be published; what cannot be removed stays."""
    shutil.rmtree(working, ignore_errors=True)


def restore(folder: Path) -> None:
    """Rename a replaced checkpoint back if the successor of the same step never came.

    Raises:
        OSError: a folder cannot be renamed.
    """
    for replaced in folder.glob(f"{_REPLACED}*"):
        final = folder / replaced.name.removeprefix(_REPLACED)
        if not final.is_dir() or not any(final.iterdir()):
            replaced.rename(final)


def clear(folder: Path) -> None:
    """Remove the remains of interrupted saves.

    Raises:
        OSError: something cannot be removed.
    """
    restore(folder)
    for prefix in (_SAVING, _REPLACED, _DELETED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path)


def outdated(folder: Path, newest: int, keep: int) -> Iterator[Path]:
    """Complete checkpoints before the `keep` newest ones up to step `newest`."""
    steps = [step for step in complete_steps(folder) if step <= newest]
    for step in steps[keep:]:
        yield step_folder(folder, step)


def remove(checkpoint: Path) -> None:
    """Remove a published checkpoint: its name first, in one step.

    Raises:
        OSError: it cannot be renamed or removed.
    """
    gone = checkpoint.with_name(_DELETED + checkpoint.name)
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def write_tracker(path: Path, text: str) -> None:
    """Write Megatron's file of the newest step: the old one or the new one, never half of it.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    # On the disk before the name.
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk.

    Raises:
        OSError: the disk refuses.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
