"""Names of machines: host names as a shell and ssh need them, and names of a machine's islands."""

from __future__ import annotations

import ipaddress
import re

_ISLAND = "/"
"""No host name has it."""

_RANGE = re.compile(r"([^\[\]]*)\[([0-9,-]{1,200})\]([^\[\]]*)")
_MOST_NAMES = 8192
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?", re.ASCII)


def check_host_name(name: str) -> str:
    """Return `name` when RFC 1123 allows it.

    Names reach command lines (`ssh HOST`), where one like `-oProxyCommand=...` is an attack.

    Raises:
        ValueError: it is not a host name.
    """
    if is_number(name):
        raise ValueError(
            f'"{name}" is not a host name: programs read a name that ends in a number as an IPv4 '
            "address, which it does not spell in full; write all four parts, or add a letter"
        )
    if len(name) <= 253 and all(_LABEL.fullmatch(label) for label in name.split(".")):
        return name
    if ":" in name:
        raise ValueError(f'"{name}" is not a host name: {_about_colons(name)}')
    raise ValueError(
        f'"{name}" is not a host name: letters, digits, "-" and "." only, no "-" at an end of '
        "a part, at most 63 characters a part and 253 in all (RFC 1123)"
    )


def _about_colons(name: str) -> str:
    """Say what a name with colons is, and what to do."""
    try:
        ipaddress.IPv6Address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return (
            "a port does not stand behind it; one of ssh's belongs into ~/.ssh/config (Host, Port)"
        )
    return (
        "IPv6 addresses are not read; give the machine a name in DNS, /etc/hosts or ~/.ssh/config"
    )


def expand_names(text: str) -> tuple[str, ...]:
    """Return the names in a range, in the notation of Slurm: "a[0-2,7]" or "n[08-10]"; a name
    without a range stands for itself.

    Raises:
        ValueError: it is no such range, or of too many names.
    """
    # Text in front, the list in brackets, and text behind.
    found = _RANGE.fullmatch(text)
    if found is None:
        if "[" in text or "]" in text:
            raise ValueError(f'"{text[:64]}": a range of names is like a[0-3] or n[08-10,12]')
        return (text,)
    names: list[str] = []
    for part in found[2].split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise ValueError(f'"{text[:64]}": "{part}" is no range, such as 0-3')
        # The number is checked before names are made, as one range may stand for billions.
        if int(last) - int(first) + len(names) >= _MOST_NAMES:
            raise ValueError(f'"{text[:64]}" stands for more than {_MOST_NAMES} names')
        # "08" asks for names as wide as that.
        width = len(first) if first.startswith("0") else 0
        names += [f"{found[1]}{n:0{width}d}{found[3]}" for n in range(int(first), int(last) + 1)]
    return tuple(names)


def is_number(name: str) -> bool:
    """Tell a name that resolvers take for an address without four parts: "0" is 0.0.0.0, every
    interface, and "134744072" is 8.8.8.8."""
    # Resolvers look at the last part alone.
    if not _NUMBER.fullmatch(name.rpartition(".")[2]):
        return False
    try:
        ipaddress.IPv4Address(name)
    except ValueError:
        return True
    return False


def island_name(machine: str, label: str) -> str:
    """Return the name of the node that stands for some of a machine's GPUs
    (`cluster.nodes.Node`)."""
    return f"{machine}{_ISLAND}{label}"


def machine_of(node: str) -> str:
    """Return the name, in the file, of the machine that a node is or is an island of."""
    return node.partition(_ISLAND)[0]


def node_words(node: str) -> str:
    """Write a node's name for people: `box (RTX-3090)` of an island, else the machine's."""
    machine, separator, label = node.partition(_ISLAND)
    return f"{machine} ({label})" if separator else machine


def device_place(device: str) -> tuple[str, int]:
    """Split a GPU's name "machine:index" into the machine and the place on its bus."""
    machine, _, index = device.rpartition(":")
    return machine, int(index)
