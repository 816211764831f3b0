"""What a reader of files must never do; Python's audit events say whether it did."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import networkx  # noqa: F401 -- its import asks every installed package for backends

import megatron_hetero

_FORBIDDEN = (
    *(
        "os.system",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.startfile",
    ),
    *(
        "subprocess.Popen",
        "socket.connect",
        "socket.bind",
        "socket.getaddrinfo",
        "pickle.find_class",
    ),
    *(
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.symlink",
        "os.link",
        "os.chmod",
        "os.chown",
    ),
    *("shutil.rmtree", "shutil.copyfile", "ctypes.dlopen", "os.putenv", "os.kill"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_PACKAGE = Path(megatron_hetero.__file__).parent
_IMPORTED = (".py", ".pyc", ".so")

_watched: Path | None = None
_seen: list[str] = []
_is_hooked = False


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Note forbidden events of what runs inside.

    Args:
        folder: files below it may be read; beside them, what Python imports and the package's own.
    """
    global _watched, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hook)
        _is_hooked = True
    _seen.clear()
    _watched = folder.resolve()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield _seen
    finally:
        _watched, sys.dont_write_bytecode = None, before


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    if event in _FORBIDDEN:
        _seen.append(f"{event} {arguments!r}"[:300])
    elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path = Path(os.fsdecode(arguments[0]))
        flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
        mode = str(arguments[1] or "")
        is_written = bool(set(mode) & set("wax+") or flags & _WRITING)
        may_be_read = path.suffix in _IMPORTED or any(
            _is_inside(path, allowed) for allowed in (_watched, _PACKAGE)
        )
        if is_written or not may_be_read:
            _seen.append(f"open {path} {mode} {flags}")


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(folder)
