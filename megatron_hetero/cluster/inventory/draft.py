"""A first cluster.yaml as text: nodes, own types and links, with every guess marked as one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names, sheet_link
from megatron_hetero.cluster.driver_names import matching_words
from megatron_hetero.cluster.makers import Library, library_of_name
from megatron_hetero.errors import ClusterError

PATH_GUESSES: Mapping[str, tuple[str, str]] = {
    "NV": ("200 GB/s", "5 us"),
    "PIX": ("20 GB/s", "10 us"),
    "PXB": ("20 GB/s", "10 us"),
    "PHB": ("12 GB/s", "12 us"),
    "NODE": ("12 GB/s", "12 us"),
    "SYS": ("8 GB/s", "15 us"),
}
"""What a kind of path of `nvidia-smi topo -m` usually carries between two GPUs; a place to start,
marked as a guess in the file."""
_GUESS = "  # a guess: measure it"
NODES_GUESS = ("10 Gb/s", "50 us")
SITES_GUESS = ("1 Gb/s", "10 ms")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9.-]*", re.ASCII)
_SHEET_PART = 2 / 3
"""Of the rate of NVLink or Infinity Fabric that the sheet prints, what is usually seen."""


@dataclass(frozen=True)
class TypeDraft:
    """What a file says of a GPU that the catalogue lacks; None where nobody knows yet, which is
    written with a question mark and does not load."""

    memory: str | None = None
    memory_bandwidth: str | None = None
    bf16: str | None = None
    compute_capability: str | None = None
    library: Library | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a file with it loads."""
        return None not in (self.memory, self.memory_bandwidth, self.bf16)

    def line(self, name: str) -> str:
        """Its line under `gpu_types`."""
        parts = [
            f"memory: {self.memory or _unknown('GB')}",
            f"memory_bandwidth: {self.memory_bandwidth or _unknown('GB/s')}",
            f"bf16: {self.bf16 or _unknown('TFLOPS')}",
        ]
        if self.compute_capability:
            parts.append(f'compute_capability: "{self.compute_capability}"')
        if self.library:
            parts.append(f"library: {self.library}")
        return f"  {_text(name)}: {{{', '.join(parts)}}}"


@dataclass(frozen=True)
class CardsDraft:
    """Cards of one kind that stand side by side on a machine's bus: `gpu` is a name of the
    catalogue, or of an own type.

    `link`: bandwidth and latency between two of them, None where it is the machine's.
    """

    gpu: str
    count: int
    link: tuple[str, str] | None = None
    link_is_measured: bool = False
    described: TypeDraft | None = None
    """What the file must say of the GPU, because the catalogue lacks it."""
    reserve: str | None = None
    """Memory that a screen takes of each."""


@dataclass(frozen=True)
class PairDraft:
    """A path of its own between any two of these cards."""

    cards: tuple[int, ...]
    link: tuple[str, str]


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

    @property
    def count(self) -> int:
        """All its GPUs."""
        return sum(cards.count for cards in self.cards)

    @property
    def has_one_kind(self) -> bool:
        """Whether `gpu` and `count` say all of its cards."""
        return len(self.cards) == 1 and self.cards[0].reserve is None


def node_of_cards(name: str, cards: Sequence[CardsDraft], site: str = "main") -> NodeDraft:
    """A machine of which only its cards are known: between unlike ones a guess."""
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
    """Nodes that a list of somebody's names, and what of the list was left out and why."""

    nodes: tuple[NodeDraft, ...]
    notes: tuple[str, ...] = ()


def link_guess(gpu: str) -> tuple[str, str]:
    """Bandwidth and latency that two GPUs of a machine may see, from how they are joined as the
    sheet has it; for GPUs that the catalogue lacks, those of PCIe."""
    try:
        link = sheet_link(gpu)
    except ClusterError:
        return PATH_GUESSES["PHB"]
    if link.kind.startswith("PCIe"):
        return PATH_GUESSES["PHB"]
    return f"{_SHEET_PART * link.bytes_per_s / 1e9:.0f} GB/s", "5 us"


def gpu_of_list(
    name: str, means: Mapping[str, str], memory_bytes: int | None = None
) -> tuple[str, TypeDraft | None]:
    """The catalogue's GPU behind the name that a scheduler gives it ("a100",
    "NVIDIA-A100-SXM4-80GB"), or a name of its own and what the file must say of it.

    Args:
        means: what the user says that names mean.
        memory_bytes: of the GPU, where the list has it.
    Raises:
        ClusterError: the name could be several GPUs, or `means` is no GPU of the catalogue.
    """
    if name in means:
        return gpu_type(means[name]).name, None
    plain = name.replace("_", "-")
    try:
        known = gpu_type(plain)
        if memory_bytes is None or abs(known.memory_bytes / memory_bytes - 1) < 0.1:
            return known.name, None
    except ClusterError:
        pass
    words = {n: matching_words(n, plain) for n in gpu_type_names()}
    if memory_bytes is not None:
        words = {
            n: w if abs(gpu_type(n).memory_bytes / memory_bytes - 1) < 0.1 else 0
            for n, w in words.items()
        }
    most = max(words.values())
    found = [n for n, w in words.items() if w == most > 0]
    if len(found) == 1:
        return found[0], None
    if found:
        raise ClusterError(
            f'"{name}" could be {" or ".join(found)}; say which with --gpu-name {name}={found[0]}'
        )
    memory = None if memory_bytes is None else f"{memory_bytes >> 20} MiB"
    return made_up_name(plain), TypeDraft(memory=memory, library=library_of_name(plain))


def made_up_name(name: str) -> str:
    """A GPU's name as a key of `gpu_types`: letters, digits, "-" and "."."""
    words = name.replace("NVIDIA", "").replace("GeForce", "").replace("-", " ").split()
    kept = ("".join(c for c in w if c.isascii() and (c.isalnum() or c == ".")) for w in words)
    return "-".join(word for word in kept if word)[:64] or "GPU"


def cluster_yaml(
    nodes: Sequence[NodeDraft], heading: str, network: NetworkDraft | None = None
) -> str:
    """The text of a cluster file; values that nobody has measured or given are marked so."""
    classes = _classes(nodes)
    node_lines = (line for node in nodes for line in _node_lines(node, classes))
    lines = [f"# {heading}", "version: 1", "", "nodes:", *node_lines]
    described = {c.gpu: c.described for n in nodes for c in n.cards if c.described is not None}
    if described:
        if not all(draft.is_complete for draft in described.values()):
            hint = "  # Not in the catalogue: give the dense peaks of the sheet."
            lines += ["", "gpu_types:", hint]
        else:
            lines += ["", "gpu_types:"]
        lines += [draft.line(name) for name, draft in described.items()]
    links = list(_link_lines(nodes, classes, network or NetworkDraft()))
    if links:
        lines += ["", "links:", "  # What one pair of GPUs sees, in one direction.", *links]
    return "\n".join(lines) + "\n"


def _classes(nodes: Sequence[NodeDraft]) -> dict[str, CardsDraft]:
    """By GPU type, the cards whose link stands for all machines of them: the first."""
    classes: dict[str, CardsDraft] = {}
    for node in nodes:
        if node.has_one_kind and node.cards[0].link is not None and node.count > 1:
            classes.setdefault(node.cards[0].gpu, node.cards[0])
    return classes


def _node_lines(node: NodeDraft, classes: Mapping[str, CardsDraft]) -> Iterator[str]:
    head = [f"name: {_text(node.name)}"]
    tail = [f"site: {_text(node.site)}"] if node.site != "main" else []
    if node.host is not None and node.host != node.name:
        tail.append(f"host: {_text(node.host)}")
    link, is_measured = node.link, node.link_is_measured
    if node.has_one_kind:
        (cards,) = node.cards
        known = classes.get(cards.gpu, cards)
        if known.link != cards.link:
            link, is_measured = cards.link, cards.link_is_measured
        head += [f"gpu: {_text(cards.gpu)}", f"count: {cards.count}"]
        if link is None and not node.pairs:
            yield f"  - {{{', '.join(head + tail)}}}"
            return
    first, *others = head + tail
    yield f"  - {first}"
    yield from (f"    {word}" for word in others)
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


def _cards_line(cards: CardsDraft, of_machine: tuple[str, str] | None) -> str:
    parts, guesses = [f"type: {_text(cards.gpu)}", f"count: {cards.count}"], []
    if cards.reserve is not None:
        parts.append(f"reserve: {cards.reserve}")
        guesses.append("drives a screen")
    if cards.link is not None and cards.count > 1 and cards.link != of_machine:
        parts.append(f"link: {_link(cards.link, is_guess=False)}")
        if not cards.link_is_measured:
            guesses.append("a guess: measure it")
    comment = f"  # {'; '.join(guesses)}" if guesses else ""
    return f"      - {{{', '.join(parts)}}}{comment}"


def _link_lines(
    nodes: Sequence[NodeDraft], classes: Mapping[str, CardsDraft], network: NetworkDraft
) -> Iterator[str]:
    if classes:
        yield "  inside_node:"
        for name, cards in classes.items():
            if cards.link is not None:
                yield f"    {_text(name)}: {_link(cards.link, is_guess=not cards.link_is_measured)}"
    sites = list(dict.fromkeys(node.site for node in nodes))
    several = [s for s in sites if sum(node.site == s for node in nodes) > 1]
    if several and sites == ["main"]:
        given = network.between_nodes.get("main")
        yield f"  between_nodes: {_link(given or NODES_GUESS, is_guess=given is None)}"
    elif several:
        yield "  between_nodes:"
        for site in several:
            given = network.between_nodes.get(site)
            yield f"    {_text(site)}: {_link(given or NODES_GUESS, is_guess=given is None)}"
    if len(sites) > 1:
        yield "  between_sites:"
        for pair in combinations(sites, 2):
            given = network.between_sites.get(pair) or network.between_sites.get(pair[::-1])
            bandwidth, latency = given or SITES_GUESS
            mark = "" if given else _GUESS
            yield (
                f"    - {{sites: [{_text(pair[0])}, {_text(pair[1])}], "
                f"bandwidth: {bandwidth}, latency: {latency}}}{mark}"
            )


def _text(name: str) -> str:
    """A name as YAML reads it back: in quotes where it could be a number or a word of YAML's."""
    is_plain = _PLAIN.fullmatch(name) and name.lower() not in ("null", "true", "false")
    return name if is_plain else json.dumps(name)


def _link(link: tuple[str, str], *, is_guess: bool) -> str:
    mark = _GUESS if is_guess else ""
    return f"{{bandwidth: {link[0]}, latency: {link[1]}}}{mark}"


def _unknown(unit: str) -> str:
    return f'"? {unit}"'
