"""The links between nodes, kept as classes: a cluster has far more pairs than kinds of path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from math import inf, log
from typing import ClassVar

NodePair = tuple[str, str]
"""Names of two nodes, sender first."""


@dataclass(frozen=True)
class Incast:
    """A limit of concurrent senders: up to `num_senders` may send to one receiver at once; each one
    more makes a byte, from any of them, take `slowdown` times its own time longer."""

    num_senders: int
    slowdown: float


@dataclass(frozen=True)
class NvlinkCurve:
    """Constants of NCCL's collectives over NVLink; `cost.network.collectives` prices with them.

    NCCL has protocols for small buffers, and one for large ones.  Either takes a fixed time, a time
    for each step, and the bytes' time.  Bandwidths are parts of what an all-reduce of eight GPUs
    reaches with large buffers, which is `part_of_sheet` of one direction of a GPU's NVLink.

    `small_*`: of small buffers, with `small_part` of the bandwidth; `large_*`: of large ones, with
    the part of a group's size in `group_parts` ((GPUs, part), ascending), and in all-gathers and
    reduce-scatters `gather_part` of that.
    """

    small_call_s: float
    small_step_s: float
    small_part: float
    large_call_s: float
    large_step_s: float
    gather_part: float
    part_of_sheet: float
    group_parts: tuple[tuple[int, float], ...]

    NUMBERS: ClassVar[tuple[str, ...]] = (
        *("small_call_s", "small_step_s", "small_part", "large_call_s", "large_step_s"),
        *("gather_part", "part_of_sheet"),
    )

    def group_part(self, num_ranks: int) -> float:
        """Return the part of the bandwidth that a group of a size reaches: between two sizes in a
        line over the logarithm, beyond them that of the nearest.

        >>> NvlinkCurve(0, 0, 1, 0, 0, 1, 1, ((2, 0.5), (8, 1.0))).group_part(4)
        0.75
        """
        first, last = self.group_parts[0], self.group_parts[-1]
        if num_ranks <= first[0]:
            return first[1]
        for (less, part), (more, other) in pairwise(self.group_parts):
            if num_ranks <= more:
                return part + (other - part) * log(num_ranks / less) / log(more / less)
        return last[1]


@dataclass(frozen=True)
class Link:
    """One direction of a path between two devices: `latency_s + bytes / bytes_per_s`.

    `jitter_s`: what a message may be late beside that, at a high quantile.  `reduce_bytes_per_s`:
    memory traffic, reads and writes, with which a rank adds what it receives to its own; infinite
    where that hides behind the link.  `cost.network.link_terms` prices it, and `incast`.
    `group_bytes_per_s`: (ranks, bandwidth), ascending, of rings of so many ranks or more, which
    crowd a bus that a pair has for itself.
    `nic_bytes_per_s`: between machines of which one has several NICs, what the network carries of
    one pair of GPUs, over one NIC at each end; `bytes_per_s` is that of all GPUs of the two.
    `nvlink`: constants of collectives, where the link is an NVLink of which there are tables; they
    stand in place of the latency.
    """

    bytes_per_s: float
    latency_s: float
    jitter_s: float = 0.0
    reduce_bytes_per_s: float = inf
    incast: Incast | None = None
    group_bytes_per_s: tuple[tuple[int, float], ...] = ()
    nic_bytes_per_s: float = inf
    nvlink: NvlinkCurve | None = field(default=None, hash=False)

    def ring_bytes_per_s(self, num_ranks: int) -> float:
        """Return what each of `num_ranks` ranks in a ring gets.

        >>> Link(50e9, 0.0, group_bytes_per_s=((4, 9e9),)).ring_bytes_per_s(5)
        9000000000.0
        """
        # Ascending sizes: the last that the ring reaches counts.
        found = [speed for size, speed in self.group_bytes_per_s if size <= num_ranks]
        return found[-1] if found else self.bytes_per_s

    def times_as_fast(self, factor: float) -> Link:
        """Return the link with `factor` times the bandwidth, of pairs and of rings."""
        return replace(
            self,
            bytes_per_s=factor * self.bytes_per_s,
            group_bytes_per_s=tuple((n, factor * speed) for n, speed in self.group_bytes_per_s),
            nic_bytes_per_s=factor * self.nic_bytes_per_s,
        )

    @property
    def terms(self) -> tuple[float | Incast | None, ...]:
        """Return the costs beside latency and bandwidth, in its collectives; empty for none."""
        if self.reduce_bytes_per_s == inf and self.incast is None:
            return ()
        return self.reduce_bytes_per_s, self.incast

    @property
    def without_terms(self) -> Link:
        """Return the same link without `terms`."""
        return replace(self, reduce_bytes_per_s=inf, incast=None)


class NodeLinks(Mapping[NodePair, Link]):
    """Link of each ordered pair of nodes, from classes and exceptions.

    Args:
        sites: the site of each node, in the order of the nodes.
        site_links: by (site, site), both orders; a site with itself is the path between its nodes.
        pair_links: by (node, node), both orders; they beat the classes.
    """

    def __init__(
        self,
        sites: Mapping[str, str],
        site_links: Mapping[tuple[str, str], Link],
        pair_links: Mapping[NodePair, Link],
    ) -> None:
        self.sites = sites
        self.site_links = site_links
        self.pair_links = pair_links

    def __getitem__(self, pair: NodePair) -> Link:
        # A link of the pair itself beats the class of its sites.
        if pair in self.pair_links:
            return self.pair_links[pair]
        a, b = pair
        if a == b:
            # A node has no link to itself here; inside it `Node.link` counts.
            raise KeyError(pair)
        return self.site_links[self.sites[a], self.sites[b]]

    def __iter__(self) -> Iterator[NodePair]:
        return ((a, b) for a, b in product(self.sites, self.sites) if (a, b) in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, pair: object) -> bool:
        try:
            self[pair]  # type: ignore[index]
        except (KeyError, TypeError, ValueError):
            return False
        return True

    def mapped(self, change: Callable[[Link], Link]) -> NodeLinks:
        """Return the same links, each changed."""
        return NodeLinks(
            self.sites,
            {pair: change(link) for pair, link in self.site_links.items()},
            {pair: change(link) for pair, link in self.pair_links.items()},
        )


def mapped_links(
    links: Mapping[NodePair, Link], change: Callable[[Link], Link]
) -> Mapping[NodePair, Link]:
    """Return `links` with every link changed."""
    # Classes are changed as classes, which keeps the summary cheap.
    if isinstance(links, NodeLinks):
        return links.mapped(change)
    return {pair: change(link) for pair, link in links.items()}


@dataclass(frozen=True)
class LinkSummary:
    """Links of a cluster in a form that does not depend on the form of the description.

    `usual` is, by (site, site), the link that most ordered pairs of their nodes have (of equally
    many the slowest); `others` are the pairs with another.
    """

    usual: Mapping[tuple[str, str], Link]
    others: Mapping[NodePair, Link]

    @cached_property
    def fastest_bytes_per_s(self) -> float | None:
        """Return the bandwidth of the fastest link between two nodes; None with one node."""
        links = (*self.usual.values(), *self.others.values())
        return max((link.bytes_per_s for link in links), default=None)


def summarise_links(site_of: Mapping[str, str], links: Mapping[NodePair, Link]) -> LinkSummary:
    """Group the links between nodes by pairs of sites, in time proportional to the pairs of sites
    and the pairs of nodes with a link of their own.

    Args:
        site_of: the site of every node; links of other nodes do not count.
    """
    # Nodes of each site, and the pairs with links of their own by sites.
    nodes_of: dict[str, list[str]] = {}
    for name, site in site_of.items():
        nodes_of.setdefault(site, []).append(name)
    classes = links.site_links if isinstance(links, NodeLinks) else {}
    # (site, site) -> pairs with a link of their own.
    own: dict[tuple[str, str], dict[NodePair, Link]] = {}
    for pair, link in (links.pair_links if isinstance(links, NodeLinks) else links).items():
        a, b = pair
        if a in site_of and b in site_of:
            own.setdefault((site_of[a], site_of[b]), {})[pair] = link
    usual: dict[tuple[str, str], Link] = {}
    others: dict[NodePair, Link] = {}
    # The most frequent link of a pair of sites is its usual one.
    for key in dict.fromkeys([*classes, *own]):
        pairs = own.get(key, {})
        ones, rest = nodes_of.get(key[0], []), nodes_of.get(key[1], [])
        # How many ordered pairs have each link; pairs of the class are counted, not listed.
        found = Counter(pairs.values())
        if key in classes:
            found[classes[key]] += len(ones) * (len(rest) - (key[0] == key[1])) - len(pairs)
        if not any(found.values()):
            continue
        # Of equally frequent links the slowest, and then by value, so that the choice is one.
        link = min(found, key=lambda k: (-found[k], k.bytes_per_s, k.latency_s, repr(k.terms)))
        usual[key] = link
        # Pairs with another link are listed.
        if key in classes and link != classes[key]:  # most pairs have a link of their own
            pairs = {(a, b): links[a, b] for a, b in product(ones, rest) if a != b}
        others |= {pair: other for pair, other in pairs.items() if other != link}
    return LinkSummary(usual, others)
