"""The text of a first cluster.yaml: nodes, own types and links, with every guess marked as one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from megatron_hetero.cluster.inventory.draft import (
    CardsDraft,
    NetworkDraft,
    NicsDraft,
    NodeDraft,
    TypeDraft,
)
from megatron_hetero.cluster.makers import LIBRARIES
from megatron_hetero.cluster.nics import near_in_order

NODES_GUESS = ("10 Gb/s", "50 us")
NIC_GUESS = 100
"""Gb/s of a NIC near a GPU."""
_NICS_LATENCY = "10 us"
SITES_GUESS = ("1 Gb/s", "10 ms")
_GUESS = "  # a guess: measure it"
_HINT = (
    "  # Not in the catalogue: give the dense peaks of its data sheet, as for an RTX 3090:",
    "  # {memory: 24 GB, memory_bandwidth: 936 GB/s, bf16: 71 TFLOPS, library: NCCL}",
)
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9.-]*", re.ASCII)


def cluster_yaml(
    nodes: Sequence[NodeDraft], heading: str, network: NetworkDraft | None = None
) -> str:
    """Write the text of a cluster file; values that nobody has measured or given are marked so.

    Args:
        nodes: the machines, in the order of the file.
        heading: the comment in its first line.
        network: links that somebody gave; None has guesses for all.
    """
    classes = _classes(nodes)
    node_lines = (line for node in nodes for line in _node_lines(node, classes))
    lines = [f"# {heading}", "version: 1", "", "nodes:", *node_lines]
    # Types that the catalogue lacks need an entry, by name.
    described = {c.gpu: c.described for n in nodes for c in n.cards if c.described is not None}
    if described:
        # A question mark in the entry does not load, so the user sees what is missing.
        if not all(draft.is_complete for draft in described.values()):
            lines += ["", "gpu_types:", *_HINT]
        else:
            lines += ["", "gpu_types:"]
        lines += [_type_line(name, draft) for name, draft in described.items()]
    links = list(_link_lines(nodes, classes, network or NetworkDraft()))
    if links:
        lines += ["", "links:", "  # What one pair of GPUs sees, in one direction.", *links]
    return "\n".join(lines) + "\n"


def _classes(nodes: Sequence[NodeDraft]) -> dict[str, CardsDraft]:
    """Choose for each GPU type the first cards whose link can stand for all machines of the
    type."""
    classes: dict[str, CardsDraft] = {}
    for node in nodes:
        # Only a machine of equal cards can speak for its type.
        if node.has_one_kind and node.cards[0].link is not None and node.count > 1:
            classes.setdefault(node.cards[0].gpu, node.cards[0])
    return classes


def _node_lines(node: NodeDraft, classes: Mapping[str, CardsDraft]) -> Iterator[str]:
    # Words of the entry: what it is first, then where and how it is reached.
    head = [f"name: {_text(node.name)}"]
    tail = [f"site: {_text(node.site)}"] if node.site != "main" else []
    if node.host is not None and node.host != node.name:
        tail.append(f"host: {_text(node.host)}")
    if node.price_per_hour is not None:
        tail.append(f"price_per_hour: {node.price_per_hour}")
    nics = node.nics if node.nics is not None and node.nics.count > 1 else None
    if nics is not None:
        tail.append(f"nics: {_nics(nics)}")
    mark = _GUESS if nics is not None and nics.gb_per_s is None else ""
    link, is_measured = node.link, node.link_is_measured
    # A node of one kind may fit on one line.
    if node.has_one_kind:
        (cards,) = node.cards
        # A link that is the type's own is written once, under `links`.
        known = classes.get(cards.gpu, cards)
        if known.link != cards.link:
            link, is_measured = cards.link, cards.link_is_measured
        head += [f"gpu: {_text(cards.gpu)}", f"count: {cards.count}"]
        if link is None and not node.pairs:
            yield f"  - {{{', '.join(head + tail)}}}{mark}"
            return
    # The first word opens the item of the list; a mark stands behind the last one.
    first, *others = head + tail
    yield f"  - {first}"
    yield from (f"    {word}" for word in others[:-1])
    yield from (f"    {word}{mark}" for word in others[-1:])
    # Unlike cards, a link of the node's own, and pairs with other links.
    if not node.has_one_kind:
        yield "    gpus:"
        yield from (_cards_line(cards, node.link) for cards in node.cards)
    if link is not None:
        yield f"    link: {_link(link, is_guess=not is_measured)}"
    if node.pairs:
        yield "    pairs:"
        for pair in node.pairs:
            bandwidth, latency = pair.link
            yield (
                f"      - {{cards: {list(pair.cards)}, bandwidth: {bandwidth}, "
                f"latency: {latency}}}{_GUESS}"
            )


def _nics(nics: NicsDraft) -> str:
    """Return the value of a machine's `nics`: `gpus` where they are not simply divided in order."""
    count = nics.count
    parts = [f"count: {count}", f"bandwidth: {nics.gb_per_s or NIC_GUESS} Gb/s"]
    if nics.near != near_in_order(len(nics.near), count):
        own = [[g for g, near in enumerate(nics.near) if near == nic] for nic in range(count)]
        parts.append(f"gpus: {own}")
    return f"{{{', '.join(parts)}}}"


def _cards_line(cards: CardsDraft, of_machine: tuple[str, str] | None) -> str:
    parts, guesses = [f"type: {_text(cards.gpu)}", f"count: {cards.count}"], []
    if cards.reserve is not None:
        parts.append(f"reserve: {cards.reserve}")
        guesses.append("drives a screen")
    # The machine's own link is written once, for all of its cards.
    if cards.link is not None and cards.count > 1 and cards.link != of_machine:
        parts.append(f"link: {_link(cards.link, is_guess=False)}")
        if not cards.link_is_measured:
            guesses.append("a guess: measure it")
    comment = f"  # {'; '.join(guesses)}" if guesses else ""
    return f"      - {{{', '.join(parts)}}}{comment}"


def _type_line(name: str, draft: TypeDraft) -> str:
    """Return the line of a type under `gpu_types`."""
    parts = [
        f"memory: {draft.memory or _unknown('GB')}",
        f"memory_bandwidth: {draft.memory_bandwidth or _unknown('GB/s')}",
        *_peaks(draft),
    ]
    if draft.compute_capability:
        parts.append(f'compute_capability: "{draft.compute_capability}"')
    if draft.library == "unknown":
        parts.append(f'library: "? {", ".join(LIBRARIES)}"')
    elif draft.library:
        parts.append(f"library: {draft.library}")
    return f"  {_text(name)}: {{{', '.join(parts)}}}"


def _peaks(draft: TypeDraft) -> list[str]:
    """Return the peaks to fill in: cards before compute capability 8.0 have no bf16."""
    capability = draft.compute_capability
    if draft.bf16 is None and capability is not None and float(capability) < 8:
        return [f"{name}: {_unknown('TFLOPS')}" for name in ("fp16", "fp32")]
    return [f"bf16: {draft.bf16 or _unknown('TFLOPS')}"]


def _link_lines(
    nodes: Sequence[NodeDraft], classes: Mapping[str, CardsDraft], network: NetworkDraft
) -> Iterator[str]:
    # Inside nodes, by GPU type.
    if classes:
        yield "  inside_node:"
        for name, cards in classes.items():
            if cards.link is not None:
                yield f"    {_text(name)}: {_link(cards.link, is_guess=not cards.link_is_measured)}"
    # Between nodes, one link for all or one for each site.
    sites = list(dict.fromkeys(node.site for node in nodes))
    # A site of one machine has no link between machines.
    several = [s for s in sites if sum(node.site == s for node in nodes) > 1]
    if several and sites == ["main"]:
        given = network.between_nodes.get("main")
        guess = _nodes_guess(nodes)
        yield f"  between_nodes: {_link(given or guess, is_guess=given is None)}"
    elif several:
        yield "  between_nodes:"
        for site in several:
            given = network.between_nodes.get(site)
            guess = _nodes_guess([node for node in nodes if node.site == site])
            yield f"    {_text(site)}: {_link(given or guess, is_guess=given is None)}"
    # Between sites, pair by pair.
    if len(sites) > 1:
        yield "  between_sites:"
        for pair in combinations(sites, 2):
            # A pair of sites may be given in either order.
            given = network.between_sites.get(pair) or network.between_sites.get(pair[::-1])
            bandwidth, latency = given or SITES_GUESS
            mark = "" if given else _GUESS
            yield (
                f"    - {{sites: [{_text(pair[0])}, {_text(pair[1])}], "
                f"bandwidth: {bandwidth}, latency: {latency}}}{mark}"
            )


def _nodes_guess(nodes: Sequence[NodeDraft]) -> tuple[str, str]:
    """Guess the link between machines of a site: what the slowest of their NICs runs at."""
    # One NIC that is not known leaves the whole site to a guess.
    rates = [None if node.nics is None else node.nics.gb_per_s for node in nodes]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return NODES_GUESS
    return f"{min(known)} Gb/s", _NICS_LATENCY


def _text(name: str) -> str:
    """Quote a name that YAML would read as a number or a reserved word."""
    is_plain = _PLAIN.fullmatch(name) and name.lower() not in ("null", "true", "false")
    return name if is_plain else json.dumps(name)


def _link(link: tuple[str, str], *, is_guess: bool) -> str:
    mark = _GUESS if is_guess else ""
    return f"{{bandwidth: {link[0]}, latency: {link[1]}}}{mark}"


def _unknown(unit: str) -> str:
    return f'"? {unit}"'
