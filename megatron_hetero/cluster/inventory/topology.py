"""Paths between the GPUs and NICs of a machine, as printed by `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_hetero.cluster.inventory.measurements import MAX_TEXT
from megatron_hetero.errors import FileFormatError

JOINS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Kinds of paths, the nearest first; NV4 is four NVLinks."""
_JOIN = re.compile("|".join(("X", "NV[0-9]{1,3}", *JOINS[1:])))
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NIC_DEVICE = re.compile(r"\s*(NIC[0-9]{1,3}):\s*([A-Za-z][A-Za-z0-9_]{0,31})\s*$", re.ASCII)
_OWN_NAME = re.compile(r"mlx[0-9]_[0-9]{1,3}", re.ASCII)
"""Older drivers name NICs in the heading itself."""


@dataclass(frozen=True)
class Topology:
    """Paths inside a machine, by the driver's numbers of GPUs.

    Attributes:
        joins: (GPU, GPU) -> kind of path (NV4, PIX, PXB, PHB, NODE, SYS), both orders.
        nics: (GPU, device of a NIC as `mlx5_0`) -> kind of path.
    """

    joins: Mapping[tuple[int, int], str]
    nics: Mapping[tuple[int, str], str] = MappingProxyType({})

    @property
    def gpus(self) -> frozenset[int]:
        """Return the driver's numbers of the GPUs; a single GPU is joined with none."""
        return frozenset(gpu for pair in self.joins for gpu in pair) or frozenset({0})


def rank_of(join: str) -> int:
    """Return the place of a kind of path in `JOINS`."""
    return JOINS.index("NV" if join.startswith("NV") else join)


def parse_topology(text: str, source: str) -> Topology:
    """Read the matrix.

    Raises:
        FileFormatError: no such matrix.
    """
    # Columns: GPUs, then NICs.
    lines = _COLOURS.sub("", text[:MAX_TEXT]).splitlines()
    heading = next((line for line in lines if re.match(r"^\s*GPU0\b", line)), None)
    if heading is None:
        raise FileFormatError(f"{source} is no output of `nvidia-smi topo -m`: no column GPU0")
    columns = heading.split()
    # Columns of GPUs come first, whatever follows them.
    num_gpus = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in columns)
    devices = _nics(columns[num_gpus:], lines)
    joins: dict[tuple[int, int], str] = {}
    nics: dict[tuple[int, str], str] = {}
    # One row for each GPU, with a word for every column.
    for line in lines[lines.index(heading) + 1 :]:
        row = re.match(r"^GPU([0-9]{1,4})\s+(.*)$", line)
        if row is None:
            continue
        # Words behind the columns are affinities of processors and memory.
        gpu, words = int(row[1]), row[2].split()[: num_gpus + len(devices)]
        if len(words) < num_gpus + len(devices) or not all(map(_JOIN.fullmatch, words)):
            raise FileFormatError(
                f"{source}: the row of GPU{gpu} has not {num_gpus + len(devices)} entries"
            )
        if gpu >= num_gpus:
            raise FileFormatError(f"{source}: a row of GPU{gpu}, of {num_gpus} GPUs")
        # X is the GPU itself.
        joins.update({(gpu, j): word for j, word in enumerate(words[:num_gpus]) if word != "X"})
        nics.update({(gpu, d): w for d, w in zip(devices, words[num_gpus:], strict=True)})
    # Every GPU has its row.
    if len(joins) != num_gpus * (num_gpus - 1):
        raise FileFormatError(f"{source}: {num_gpus} columns, but not as many rows")
    return Topology(joins, nics)


def _nics(columns: list[str], lines: list[str]) -> list[str]:
    """Return the devices of the columns that are NICs, by the legend if there is a legend."""
    # Newer drivers call NICs NIC0, NIC1, ... and explain the numbers in a legend.
    legend = {found[1]: found[2] for line in lines if (found := _NIC_DEVICE.match(line))}
    names = []
    for word in columns:
        if not re.fullmatch(r"NIC[0-9]{1,3}", word) and not _OWN_NAME.fullmatch(word):
            break
        names.append(legend.get(word, word))
    return names
