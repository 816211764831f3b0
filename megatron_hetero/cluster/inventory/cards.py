"""A machine of the file to be, from its cards and the output of `nvidia-smi topo -m`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from megatron_hetero.cluster.catalogue import sheet_link
from megatron_hetero.cluster.inventory.draft import (
    PATH_GUESSES,
    CardsDraft,
    NodeDraft,
    PairDraft,
    TypeDraft,
    link_guess,
)
from megatron_hetero.cluster.inventory.topology import rank_of
from megatron_hetero.errors import ClusterError

_PCIE_PART = 0.8
"""Usual part of the bandwidth of a slot's lanes that transfers reach."""

Pair = tuple[int, int]
Guess = tuple[str, str]


@dataclass(frozen=True)
class Card:
    """One card, in the order of the bus; `slot_bytes_per_s` is None where it is not known."""

    gpu: str
    described: TypeDraft | None
    reserve: str | None
    slot_bytes_per_s: float | None

    @property
    def kind(self) -> tuple[str, str | None]:
        """Return the properties shared by all cards of an entry of the file."""
        return self.gpu, self.reserve


def cards_of(
    name: str, cards: Sequence[Card], joins: Mapping[Pair, str], measured: Guess | None
) -> NodeDraft:
    """Describe the machine with these cards.

    Of the paths over PCIe between cards of one type the slowest stands for all, and that between
    unlike ones; a slot of few lanes slows those of its card.  Bridges of NVLink are pairs of their
    own where they join cards in closed groups; a web of them that leaves some cards of a type
    apart is as slow as these.

    Args:
        joins: by places on the bus; a pair that is missing crosses the sockets.
        measured: bandwidth and latency of whatever no NVLink joins.
    """
    # Cards of one kind side by side are one entry of the file.
    entries = [list(e) for _, e in groupby(range(len(cards)), key=lambda i: cards[i].kind)]
    # Pairs without an entry in the topology cross the sockets.
    paths = {pair: joins.get(pair, "SYS") for pair in combinations(range(len(cards)), 2)}
    bridged = _bridged(cards, paths)
    # Over PCIe, the slowest path between two types stands for all of their pairs.
    # Types of a pair -> the slowest kind of path among its pairs.
    slow: dict[frozenset[str], str] = {}
    for pair, path in paths.items():
        if pair not in bridged:
            types = _types(cards, pair)
            slow[types] = max(slow.get(types, path), path, key=rank_of)
    # (card, card) -> bandwidth and latency.
    links = {
        pair: _bridge_guess(paths[pair], cards[pair[0]].gpu)
        if pair in bridged
        else measured or _path_guess(slow[_types(cards, pair)], cards, pair)
        for pair in paths
    }
    # The link of an entry is its usual link; `said` has the pairs that the entries cover.
    drafts, said = [], dict[Pair, Guess | None]()
    # Pairs of unlike entries: their usual link is the machine's.
    between = [(a, b) for a, b in paths if cards[a].kind != cards[b].kind]
    base = _most([links[pair] for pair in between if pair not in bridged])
    for entry in entries:
        inside = list(combinations(entry, 2))
        # Inside an entry the usual path over PCIe, or the bridge where all are bridged.
        link = _most([links[p] for p in inside if p not in bridged] or [links[p] for p in inside])
        said.update(dict.fromkeys(inside, link))
        card = cards[entry[0]]
        drafts.append(
            CardsDraft(
                card.gpu,
                len(entry),
                link,
                measured is not None and link == measured,
                card.described,
                card.reserve,
            )
        )
    # Pairs with another link are written one by one.
    # A pair that no entry covers has the machine's link unless it is written.
    others = {pair: link for pair, link in links.items() if said.get(pair, base) != link}
    pairs = tuple(PairDraft(group, link) for group, link in _groups(others))
    return NodeDraft(
        name, tuple(drafts), link=base, link_is_measured=measured is not None, pairs=pairs
    )


def _bridged(cards: Sequence[Card], paths: Mapping[Pair, str]) -> set[Pair]:
    """Find the pairs joined by NVLink, in groups where every two cards are joined."""
    # Card -> the cards that NVLink joins it with, itself among them.
    partners = {i: {i} for i in range(len(cards))}
    for (a, b), path in paths.items():
        if path.startswith("NV"):
            partners[a].add(b)
            partners[b].add(a)
    # A closed group: each of its cards is joined with the same cards.
    return {
        (a, b)
        for a, b in paths
        if b in partners[a] and all(partners[c] == partners[a] for c in partners[a])
    }


def _types(cards: Sequence[Card], pair: Pair) -> frozenset[str]:
    # One key for all pairs of unlike cards.
    one, other = cards[pair[0]].gpu, cards[pair[1]].gpu
    return frozenset((one,) if one == other else ())


def _path_guess(path: str, cards: Sequence[Card], pair: Pair) -> Guess:
    """Guess the bandwidth of a path: what its kind usually carries, and no more than the narrower
    of the two slots does."""
    # NVLink in a web counts as a path over the host's bridges.
    bandwidth, latency = PATH_GUESSES["NODE" if path.startswith("NV") else path]
    slots = [s for s in (cards[i].slot_bytes_per_s for i in pair) if s is not None]
    # Transfers reach a part of what the lanes of the narrower slot carry.
    gb_per_s = _PCIE_PART * min(slots) / 1e9 if slots else float("inf")
    if gb_per_s < float(bandwidth.removesuffix(" GB/s")):
        bandwidth = f"{gb_per_s:.2g} GB/s"
    return bandwidth, latency


def _bridge_guess(path: str, gpu: str) -> Guess:
    """Guess the bandwidth of NVLinks (NV4: four of them) where the machine is not built around
    them."""
    try:
        if sheet_link(gpu).kind == "NVLink":
            return link_guess(gpu)
    except ClusterError:  # not of the catalogue
        pass
    number = path.removeprefix("NV")
    # An NVLink of a bridge carries some 10 GB/s in use.
    return (f"{10 * int(number)} GB/s", "5 us") if number.isdecimal() else PATH_GUESSES["NV"]


def _most(links: Sequence[Guess]) -> Guess | None:
    return Counter(links).most_common(1)[0][0] if links else None


def _groups(links: Mapping[Pair, Guess]) -> Iterator[tuple[tuple[int, ...], Guess]]:
    """Join pairs with an equal link into groups where every two cards have the link."""
    # Pairs that are in no group yet, with their links.
    left = dict(links)
    while left:
        (first, second), link = next(iter(left.items()))
        group = [first, second]
        # A card joins the group if it has the link to all cards of the group.
        for card in sorted({card for pair in left for card in pair}):
            if card not in group and all(
                left.get((min(card, c), max(card, c))) == link for c in group
            ):
                group.append(card)
        for pair in combinations(sorted(group), 2):
            del left[pair]
        yield tuple(sorted(group)), link
