"""The islands of a machine: its cards by type and by how they are joined.

A machine of a file is one node of a `Cluster` where all its cards are alike.  Otherwise it becomes
several, its islands: cards of one type that are joined alike, to each other and to every other card
of the machine.  "Alike" is an equivalence (if i and j see every third card by equal links, and j
and k do, all three are joined by one link), so the islands are the classes of cards.

Example: four cards, NVLink bridges between 0 and 1 and between 2 and 3, PCIe otherwise.  Cards 0
and 1 see card 2 alike, 0 and 2 do not (0 sees 1 by NVLink, 2 does not): islands {0, 1} and {2, 3}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import NoReturn

from megatron_hetero.cluster.doubt import Doubt
from megatron_hetero.cluster.file.bridges import bridge_fault
from megatron_hetero.cluster.file.links import resolve_link
from megatron_hetero.cluster.file.references import References, listed
from megatron_hetero.cluster.file.schema import CardsSection, LinkSection, LinksSection, NodeSection
from megatron_hetero.cluster.names import island_name
from megatron_hetero.cluster.node_links import Link, NodePair
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.units import format_bytes


@dataclass(frozen=True)
class Island:
    """Cards of a machine that are alike; in a machine of equal cards, all cards.

    `place` is the machine's number in the file; `link` joins any two of the cards, None where
    there is one card only.
    """

    name: str
    section: NodeSection
    place: int
    gpu: GpuType
    indices: tuple[int, ...]
    link: Link | None

    @property
    def site(self) -> str:
        """Return the site of the machine."""
        return self.section.site


@dataclass(frozen=True)
class _IslandCard:
    gpu: GpuType
    """GPU type, with the memory that `reserve` leaves."""
    entry: int
    link: LinkSection | None


def root_complexes_of_one_island(
    islands: Sequence[Island], references: References
) -> Iterator[Doubt]:
    """Yield the machines whose `root_complex` nothing counts: their cards are all alike."""
    for island in islands:
        if island.section.root_complex is not None and island.name == island.section.name:
            yield Doubt(
                references.place(("nodes", island.place, "root_complex")),
                f"it counts between unlike cards, and all cards of {island.name} are alike and "
                "joined alike, so it changes nothing",
                "what a ring of several of these cards gets is `groups` of their link",
            )


def islands_of(
    place: int,
    section: NodeSection,
    gpu_types: Mapping[str, GpuType],
    links: LinksSection,
    references: References,
) -> tuple[list[Island], dict[NodePair, Link]]:
    """Divide a machine into islands; return the islands and the links between islands, in both
    orders.

    Args:
        place: the machine's number in the file.
        section: the machine's entry.
        gpu_types: every GPU type of the file, by the name that the file gives it.
        links: the file's classes of links.
        references: the file, for messages.
    Raises:
        ClusterError: two cards have no link, or a pair names a card that is not there.
    """
    # Every card with its type; all of one communication library.
    cards = [
        card
        for entry, cards in enumerate(section.cards)
        for card in [_card(place, entry, cards, gpu_types[cards.type], references)] * cards.count
    ]
    _check_one_library(place, cards, references)
    # Cards are of one island if they are of one type and joined alike to all others.
    between = _CardLinks(place, section, cards, gpu_types, links, references)
    # Indices of cards by class; a class is a set of cards that a plan may exchange.
    classes = _classes(cards, between)
    if len(classes) == 1:
        indices = classes[0]
        return [
            Island(
                section.name, section, place, cards[0].gpu, tuple(indices), between.inside(indices)
            )
        ], {}
    # Several islands: each is a node, with links between them.
    islands = [
        Island(
            # "box/RTX-3090": the name has a sign that no host name has.
            island_name(section.name, label),
            section,
            place,
            cards[indices[0]].gpu,
            tuple(indices),
            between.inside(indices),
        )
        for label, indices in zip(_labels(cards, classes), classes, strict=True)
    ]
    return islands, {
        # Any card of an island stands for all of them, as islands are joined alike.
        (a.name, b.name): between.find(a.indices[0], b.indices[0])
        for a, b in permutations(islands, 2)
    }


def _card(
    place: int, entry: int, section: CardsSection, gpu: GpuType, references: References
) -> _IslandCard:
    # The reserve is memory that the plan cannot have, so the GPU has less of it.
    if section.reserve is not None:
        if section.reserve >= gpu.memory_bytes:
            references.fail(
                ("nodes", place, "gpus", entry, "reserve"),
                f"{format_bytes(section.reserve)} is all that a {gpu.name} has "
                f"({format_bytes(gpu.memory_bytes)}); write less, or leave the card out with "
                "limits.idle",
            )
        gpu = replace(gpu, memory_bytes=gpu.memory_bytes - section.reserve)
    return _IslandCard(gpu, entry, section.link)


def _check_one_library(place: int, cards: Sequence[_IslandCard], references: References) -> None:
    libraries = {card.gpu.library: card.gpu.name for card in cards}
    if len(libraries) > 1:
        words = " and ".join(f"{name} with {library}" for library, name in libraries.items())
        references.fail(
            ("nodes", place, "gpus"),
            f"{words} are in one machine, and no communication library is for both; describe the "
            "cards of one maker and leave the others out",
        )


def _classes(cards: Sequence[_IslandCard], between: _CardLinks) -> list[list[int]]:
    """Group the indices of like cards, each class ascending, classes sorted by the first card."""
    classes: list[list[int]] = []
    for index in range(len(cards)):
        # Being alike is transitive, so the first card of a class speaks for it.
        own = next((c for c in classes if _are_alike(c[0], index, cards, between)), None)
        if own is None:
            classes.append([index])
        else:
            own.append(index)
    return classes


def _are_alike(one: int, other: int, cards: Sequence[_IslandCard], between: _CardLinks) -> bool:
    a, b = cards[one], cards[other]
    if a.gpu != b.gpu:
        return False
    # The link between the two themselves does not count: inside an island it is the island's own.
    rest = (i for i in range(len(cards)) if i not in (one, other))
    return all(between.find(one, i) == between.find(other, i) for i in rest)


def _labels(cards: Sequence[_IslandCard], classes: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield a name for each island: its GPU type, numbered where several islands have it."""
    names = [cards[indices[0]].gpu.name for indices in classes]
    for i, name in enumerate(names):
        yield name if names.count(name) == 1 else f"{name}-{names[: i + 1].count(name)}"


class _CardLinks:
    """The link between any two cards of a machine: the closest entry that the file has for it."""

    def __init__(
        self,
        place: int,
        section: NodeSection,
        cards: Sequence[_IslandCard],
        gpu_types: Mapping[str, GpuType],
        links: LinksSection,
        references: References,
    ) -> None:
        self._place, self._section, self._cards = place, section, cards
        self._references = references
        # Types by the catalogue's name, as files may use aliases.
        self._of_type = {gpu_types[name].name: link for name, link in links.inside_node.items()}
        self._of_types = {
            frozenset(gpu_types[name].name for name in between.types): between
            for between in links.between_types
        }
        self._found: dict[tuple[int, int], Link] = {}
        self._pairs = dict(self._given_pairs())

    def find(self, one: int, other: int) -> Link:
        """Return the link of two cards, by their places on the bus.

        Raises:
            ClusterError: the file has none.
        """
        # A link holds for both directions, so each pair is looked up in one order.
        key = min(one, other), max(one, other)
        if key not in self._found:
            self._found[key] = resolve_link(self._section_of(*key))
        return self._found[key]

    def inside(self, indices: Sequence[int]) -> Link | None:
        """Return the link of cards that are alike; of one alone, what the file says of its type."""
        if len(indices) > 1:
            return self.find(*indices[:2])
        card = self._cards[indices[0]]
        for section in (card.link, self._section.link, self._of_type.get(card.gpu.name)):
            if section is not None:
                return resolve_link(section)
        return None

    def _section_of(self, one: int, other: int) -> LinkSection:
        a, b = self._cards[one], self._cards[other]
        same_entry = a.link if a.entry == b.entry else None
        of_types = (
            self._of_type.get(a.gpu.name)
            if a.gpu.name == b.gpu.name
            else self._of_types.get(frozenset((a.gpu.name, b.gpu.name)))
        )
        # A pair beats an entry, an entry the machine, and the machine the file's classes.
        closest_first = self._pairs.get((one, other)), same_entry, self._section.link, of_types
        found = next((section for section in closest_first if section is not None), None)
        return self._fail(one, other) if found is None else found

    def _given_pairs(self) -> Iterator[tuple[tuple[int, int], LinkSection]]:
        seen: dict[tuple[int, int], int] = {}
        # [p]: the cards of this entry are joined by one link, each with each.
        for p, pair in enumerate(self._section.pairs):
            keypath = ("nodes", self._place, "pairs", p, "cards")
            for card in pair.cards:
                if card >= len(self._cards):
                    self._references.fail(
                        keypath,
                        f"machine {self._section.name} has no card {card}; it has "
                        f"{len(self._cards)} (0-{len(self._cards) - 1})",
                    )
            if len(set(pair.cards)) < len(pair.cards):
                self._references.fail(keypath, "a card stands here twice; name each once")
            for key in combinations(sorted(pair.cards), 2):
                # Each pair of cards has one link at most.
                if seen.setdefault(key, p) != p:
                    self._references.fail(
                        keypath, f"cards {key[0]} and {key[1]} are in pairs[{seen[key]}] already"
                    )
                one, other = (self._cards[card].gpu for card in key)
                # A link faster than the slot needs a bridge that these cards may not have.
                fault = bridge_fault(one, other, resolve_link(pair).bytes_per_s)
                if fault is not None:
                    self._references.fail(
                        keypath,
                        f"cards {key[0]} and {key[1]}: {fault}; name the cards that a bridge joins "
                        "(`nvidia-smi topo -m` shows NV between them), or write what the path "
                        "carries (`megatron-hetero probe --pairs` measures it)",
                    )
                yield key, pair

    def _fail(self, one: int, other: int) -> NoReturn:
        a, b = self._cards[one].gpu.name, self._cards[other].gpu.name
        name = self._section.name
        example = "{bandwidth: 12 GB/s, latency: 12 us}"
        if a == b:
            remedy = f"links.inside_node.{a}"
        else:
            remedy = f"an entry of links.between_types (types: [{a}, {b}])"
        self._references.fail(
            ["nodes", self._place],
            f"{listed((name,))} has no link between its cards {one} ({a}) and {other} ({b}); add "
            f"{remedy} or a link of the machine, for example link: {example}",
        )
