"""Machines, cards and links of a first cluster.yaml, before it is written: known or guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_hetero.cluster.catalogue import sheet_link
from megatron_hetero.cluster.file.schema import MAX_NODES
from megatron_hetero.cluster.makers import Library
from megatron_hetero.cluster.nvlink import nvlink_curve
from megatron_hetero.errors import ClusterError

PATH_GUESSES: Mapping[str, tuple[str, str]] = {
    "NV": ("200 GB/s", "5 us"),
    "PIX": ("20 GB/s", "10 us"),
    "PXB": ("20 GB/s", "10 us"),
    "PHB": ("12 GB/s", "12 us"),
    "NODE": ("12 GB/s", "12 us"),
    "SYS": ("8 GB/s", "15 us"),
}
"""Usual bandwidth and latency of a kind of path of `nvidia-smi topo -m`; a place to start,
marked as a guess in the file."""
_SHEET_PART = 2 / 3
"""Usual part of the data sheet's rate of NVLink or Infinity Fabric that transfers reach, where no
table of collectives says more."""


@dataclass(frozen=True)
class TypeDraft:
    """Entry of a GPU that the catalogue lacks; None where nobody knows yet, which is written with a
    question mark and does not load."""

    memory: str | None = None
    memory_bandwidth: str | None = None
    bf16: str | None = None
    compute_capability: str | None = None
    library: Library | Literal["unknown"] | None = None
    """None is left out of the file; "unknown" is asked for there."""

    @property
    def is_complete(self) -> bool:
        """Return whether a file with this entry loads."""
        is_known = self.library != "unknown"
        return is_known and None not in (self.memory, self.memory_bandwidth, self.bf16)


@dataclass(frozen=True)
class CardsDraft:
    """Cards of a single kind, side by side on a machine's bus: `gpu` is a name of the catalogue, or
    of an own type.

    `link`: bandwidth and latency between two of them, None where it is the machine's.
    """

    gpu: str
    count: int
    link: tuple[str, str] | None = None
    link_is_measured: bool = False
    described: TypeDraft | None = None
    """Entry of the GPU in the file, needed because the catalogue lacks it."""
    reserve: str | None = None
    """Memory that a screen takes of each."""


@dataclass(frozen=True)
class PairDraft:
    """Path between any two of `cards` with a link of its own."""

    cards: tuple[int, ...]
    link: tuple[str, str]


@dataclass(frozen=True)
class NicsDraft:
    """NICs of a machine: for each of its cards the number of the one near it.

    `gb_per_s` of each in each direction, in bits; None where nobody knows.
    """

    near: tuple[int, ...]
    gb_per_s: int | None

    @property
    def count(self) -> int:
        """Count the NICs."""
        return max(self.near) + 1


@dataclass(frozen=True)
class NodeDraft:
    """A machine of the file to be, its cards in the order of the bus.

    `link` joins cards for which nothing closer is said.  `host` where it is not the name.
    """

    name: str
    cards: tuple[CardsDraft, ...]
    site: str = "main"
    host: str | None = None
    link: tuple[str, str] | None = None
    link_is_measured: bool = False
    pairs: tuple[PairDraft, ...] = ()
    nics: NicsDraft | None = None
    price_per_hour: str | None = None

    @property
    def count(self) -> int:
        """Count all its GPUs."""
        return sum(cards.count for cards in self.cards)

    @property
    def has_one_kind(self) -> bool:
        """Return whether `gpu` and `count` describe all cards of the machine."""
        return len(self.cards) == 1 and self.cards[0].reserve is None


def node_of_cards(name: str, cards: Sequence[CardsDraft], site: str = "main") -> NodeDraft:
    """Describe a machine from its cards alone: between unlike ones a guess."""
    link = PATH_GUESSES["PHB"] if len(cards) > 1 else None
    return NodeDraft(name, tuple(cards), site, link=link)


@dataclass(frozen=True)
class NetworkDraft:
    """Links that somebody gave, as (bandwidth, latency); a guess stands for the rest.

    `between_nodes` by site, `between_sites` by two sites in the order of the nodes.
    """

    between_nodes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    between_sites: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """Nodes read from a list of machines, and the parts of the list left out, with reasons."""

    nodes: tuple[NodeDraft, ...]
    notes: tuple[str, ...] = ()


def check_machines(nodes: Sequence[NodeDraft], source: str) -> None:
    """Refuse a list of machines that no cluster file can hold, before such a file is written.

    Args:
        source: where the list comes from, for the message.
    Raises:
        ClusterError: two machines have one name, or there are more than a file may have.
    """
    twice = [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
    if twice:
        raise ClusterError(
            f"{source}: {len(twice)} of the machines {'are' if len(twice) > 1 else 'is'} there "
            f'more than once ("{twice[0]}"); every machine needs a name of its own'
        )
    if len(nodes) > MAX_NODES:
        raise ClusterError(
            f"{source}: {len(nodes)} machines with GPUs; a cluster file has at most {MAX_NODES}. "
            "Leave out those that the job does not get."
        )


def link_guess(gpu: str) -> tuple[str, str]:
    """Guess the bandwidth and latency between two GPUs of a machine, from their link in the data
    sheet and from what collectives reach of it; for GPUs that the catalogue lacks, those of
    PCIe."""
    try:
        link = sheet_link(gpu)
    except ClusterError:
        return PATH_GUESSES["PHB"]
    if link.kind.startswith("PCIe"):
        return PATH_GUESSES["PHB"]
    curve = nvlink_curve(gpu)
    part = curve.part_of_sheet if curve else _SHEET_PART
    return f"{part * link.bytes_per_s / 1e9:.0f} GB/s", "5 us"


def made_up_name(name: str) -> str:
    """Turn a GPU's name into a key of `gpu_types`: letters, digits, "-" and "."."""
    # Words of the maker say nothing beside the model's.
    words = name.replace("NVIDIA", "").replace("GeForce", "").replace("-", " ").split()
    kept = ("".join(c for c in w if c.isascii() and (c.isalnum() or c == ".")) for w in words)
    return "-".join(word for word in kept if word)[:64] or "GPU"
