"""Memory of this machine that processes of a job may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

RANK_BYTES = 200 << 20
"""Memory to keep for each process of a small model, in bytes. 64 ranks took 60 MiB each, since a
forked rank shares with its parent most of what it maps."""


def most_processes() -> int:
    """Return how many processes of a small model this machine's free memory holds, at least 1."""
    return max(available_bytes() // RANK_BYTES, 1)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that processes may still take: of the machine, and of the control groups
    (containers, batch jobs) that this process is in.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    return max(min((_of_machine(root), *_of_groups(root))), 0)


def _of_machine(root: Path) -> int:
    # With the caches that the system gives back.
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    # Only Linux says so; elsewhere the free pages.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_groups(root: Path) -> Iterator[int]:
    """Yield what is left of each limit, of the process's groups and those above them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        # Version 2 is hierarchy 0 without controllers; version 1 has one for memory.
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            cached = "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cached = "total_inactive_file"
        else:
            continue
        # In a container the group's path may be that of the host, and its files lie at the mount.
        folder = mount / group.lstrip("/")
        for place in (folder, *folder.parents):
            limit, used = (_read(place / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                yield int(limit) - int(used) + _counted(_read(place / "memory.stat"), cached)
            if place == mount:
                break


def _counted(text: str, name: str) -> int:
    """Return a counter of `memory.stat`: pages of files that the system gives back first."""
    counters = dict(line.split() for line in text.splitlines() if line.count(" ") == 1)
    return int(counters.get(name, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
