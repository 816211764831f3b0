"""Files that commands write: whole or not at all, and never in the place of a device."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from megatron_hetero.errors import FileFormatError


def write_text(path: Path | str, text: str) -> None:
    """Write a file so that no reader ever sees half of it; a device or a pipe gets the text.

    Raises:
        FileFormatError: the file cannot be written there.
    """
    path = Path(path)
    check_writable(path)
    # A link stays, and what it leads to is written.
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    # In the same folder, since a rename is atomic on one file system alone; the process id keeps
    # two writers apart.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        # A rename would put a file in the place of /dev/stdout or of `>(command)`.
        if _is_device(path):
            with path.open("w", encoding="utf-8") as file:
                file.write(text)
            return
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # The content is on the disk before the name points to it.
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        # What went wrong first is what the user has to know.
        with suppress(OSError):
            temporary.unlink()
        raise FileFormatError(f"{path}: cannot be written: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Refuse the name of a file that cannot be written, before a long work that ends in the file.

    Raises:
        FileFormatError: it names a folder, or its own folder is not there or takes no file.
    """
    if path.is_dir() or not path.name:
        raise FileFormatError(f"{path}: cannot be written: it is a folder; name a file in it")
    if _is_device(path):
        return
    if not path.parent.is_dir():
        raise FileFormatError(f"{path}: cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise FileFormatError(f"{path}: cannot be written: {path.parent} takes no new file")


def make_folder(path: Path) -> None:
    """Make a folder, and the folders above it, where they are missing.

    Raises:
        FileFormatError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(f"{path}: the folder cannot be made: {error.strerror}") from None


def _is_device(path: Path) -> bool:
    """Return whether a path is a device, a pipe or an open file of a process, not a file's name."""
    return path.absolute().parts[1:2] == ("dev",) or (path.exists() and not path.is_file())
