"""The kernel's table of listening TCP sockets, of one process and its descendants or of all."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import MutableMapping
from pathlib import Path

Place = tuple[str, int]
"""Address and port."""

_LISTENING = "0A"


def listeners(
    process: int | None = None, known: MutableMapping[str, bool] | None = None
) -> set[Place]:
    """Where the processes of this network namespace listen.

    Args:
        process: only it, its children and theirs.
        known: whether sockets of earlier looks are of `process`; new ones are added.
    """
    known = {} if known is None else known
    places: dict[str, Place] = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING:
                address, port = words[1].split(":")
                places[words[9]] = _address(address), int(port, 16)
    if process is None:
        return set(places.values())
    if new := places.keys() - known.keys():
        own = set().union(*map(_sockets, _family(process)))
        known.update((socket, socket in own) for socket in new)
    return {place for socket, place in places.items() if known[socket]}


def is_loopback(place: Place) -> bool:
    """Whether nobody off this machine reaches it."""
    address = ipaddress.ip_address(place[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _address(text: str) -> str:
    """The kernel writes addresses as words of 32 bits in the machine's own order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def _family(process: int) -> set[int]:
    found = {process}
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _sockets(process: int) -> set[str]:
    """Inodes of a process's sockets, as /proc/net/tcp prints them."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{process}/fd"):
            try:
                target = os.readlink(f"/proc/{process}/fd/{name}")
            except OSError:  # closed since
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:  # the process has ended
        return found
    return found
