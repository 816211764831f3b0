"""The NICs of a machine of the file to be: which are near its GPUs, and how fast they are.

`nvidia-smi topo -m` says what is near, and Linux says under `/sys/class/infiniband` what each port
runs at (InfiniBand and RoCE alike; NICs without RDMA stand in neither).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.cluster.inventory.draft import NicsDraft
from megatron_hetero.cluster.inventory.topology import Topology, rank_of

_FOLDER = "/sys/class/infiniband"
_LINE = re.compile(rf"{_FOLDER}/(\w{{1,32}})/ports/1/(rate|state):(.{{0,80}})", re.ASCII)
_RATE = re.compile(r"([0-9]{1,4})(?:\.[0-9]+)? Gb/sec", re.ASCII)


@dataclass(frozen=True)
class NicPort:
    """Port of a NIC: its rate in Gb/s, and whether it is connected; None where it does not say."""

    gb_per_s: int | None = None
    is_active: bool | None = None


def port_files(topology: Topology) -> tuple[str, ...]:
    """Return the files that state the rate and state of a machine's NICs."""
    devices = dict.fromkeys(device for _, device in topology.nics)
    return tuple(
        f"{_FOLDER}/{device}/ports/1/{name}" for device in devices for name in ("rate", "state")
    )


def read_ports(files: Sequence[str]) -> str:
    """Return the text of the files on this machine, in the form of `grep -H .`; missing files are
    left out."""
    return "".join(
        f"{file}:{line}\n"
        for file in files
        if Path(file).is_file()
        for line in Path(file).read_text(errors="replace").splitlines()
    )


def parse_ports(text: str) -> dict[str, NicPort]:
    """Read lines of `port_files`, by device: `200 Gb/sec (4X HDR)`, `4: ACTIVE`; others do not
    count."""
    said: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if found := _LINE.match(line):
            # Device -> "rate" or "state" -> the words of its file.
            said.setdefault(found[1], {})[found[2]] = found[3]
    return {
        device: NicPort(
            # A rate that does not parse, such as "0 Gb/sec", is not known.
            int(rate[1]) if (rate := _RATE.match(words.get("rate", ""))) else None,
            "ACTIVE" in words["state"].split() if "state" in words else None,
        )
        for device, words in said.items()
    }


def draft_nics(
    gpus: Sequence[int], topology: Topology, ports: Mapping[str, NicPort]
) -> NicsDraft | None:
    """Give each GPU the nearest NIC; None if the machine has no NIC that counts.

    Of NICs that are equally near it takes the one with the fewest GPUs.  NICs that are nearest to
    no GPU (for storage, mostly) and those that are not connected do not count.

    Args:
        gpus: the driver's numbers, in the order of the bus.
        topology: of the machine.
        ports: of its NICs, as far as known.
    """
    # Connected devices only.
    devices = [
        device
        for device in dict.fromkeys(device for _, device in topology.nics)
        if ports.get(device, NicPort()).is_active is not False
    ]
    if not devices:
        return None
    # Each GPU takes the nearest, then the least taken.
    taken: Counter[str] = Counter()
    chosen = []
    for gpu in gpus:
        nearest = min(devices, key=lambda d: (rank_of(topology.nics[gpu, d]), taken[d]))
        taken[nearest] += 1
        chosen.append(nearest)
    # One bandwidth for all: the slowest, if every rate is known.
    # NICs in the order in which GPUs take them; their numbers in the file follow it.
    order = list(dict.fromkeys(chosen))
    rates = [ports.get(device, NicPort()).gb_per_s for device in order]
    known = [rate for rate in rates if rate is not None]
    slowest = min(known) if len(known) == len(rates) else None
    return NicsDraft(tuple(order.index(device) for device in chosen), slowest)
