"""The questions of `init` on a terminal: sites, machines, own types, networks.

Every question but one has a default, so that Enter all the way gives a file that loads: the library
of a GPU whose name shows no maker has to be said. An answer that cannot be is explained and asked
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.schema import MAX_GPUS_PER_NODE
from megatron_hetero.cluster.inventory.draft import (
    PATH_GUESSES,
    CardsDraft,
    NetworkDraft,
    NodeDraft,
    TypeDraft,
    link_guess,
)
from megatron_hetero.cluster.inventory.text import NODES_GUESS, SITES_GUESS
from megatron_hetero.cluster.makers import LIBRARIES, Library, library_of_name
from megatron_hetero.cluster.names import check_host_name
from megatron_hetero.errors import ClusterError, UsageError
from megatron_hetero.units import (
    UnitError,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_flops,
)

_MAX_ALIKE = 1024
_MAX_SITES = 32
_MAX_KINDS = 64


@dataclass(frozen=True)
class Draft:
    """Content of a cluster file to be."""

    nodes: tuple[NodeDraft, ...]
    network: NetworkDraft = field(default_factory=NetworkDraft)


def ask_cluster(read: Callable[[str], str], say: Callable[[str], None]) -> Draft:
    """Ask for a cluster.

    Args:
        read: shows a question and gives the answer, as `input`.
        say: shows why an answer cannot be.
    Raises:
        UsageError: the answers end before the questions do.
    """
    return _Questions(read, say).cluster()


class _Questions:
    def __init__(self, read: Callable[[str], str], say: Callable[[str], None]) -> None:
        self._read = read
        self._say = say
        self._own: dict[str, TypeDraft] = {}
        self._names: set[str] = set()

    def cluster(self) -> Draft:
        num_sites = self._number("How many sites have machines", 1, _MAX_SITES)
        # A single site needs no name of the user's.
        sites = ["main"] if num_sites == 1 else self._site_names(num_sites)
        nodes = [node for site in sites for node in self._machines(site, num_sites > 1)]
        # A site of one machine has no network within.
        inside = {
            site: self._link(f"Between two machines{_at(site, num_sites)}", NODES_GUESS)
            for site in sites
            if sum(node.site == site for node in nodes) > 1
        }
        # Each pair of sites has a link of its own.
        between = {
            (a, b): self._link(f"Between {a} and {b}", SITES_GUESS)
            for a, b in combinations(sites, 2)
        }
        return Draft(tuple(nodes), NetworkDraft(inside, between))

    def _site_names(self, count: int) -> list[str]:
        names: list[str] = []
        for number in range(1, count + 1):

            def check(text: str) -> str:
                if check_host_name(text) in names:
                    raise ValueError(f'"{text}" is a site already')
                return text

            names.append(self._ask(f"Name of site {number}", f"site-{number}", check))
        return names

    def _machines(self, site: str, named: bool) -> list[NodeDraft]:
        at = f" at {site}" if named else ""
        nodes: list[NodeDraft] = []
        for kind in range(1, self._number(f"How many kinds of machines{at}", 1, _MAX_KINDS) + 1):
            which = f"kind {kind}{at}"
            # Machines of a kind are described once; only their host names are asked one by one.
            cards = self._cards(which)
            alike = self._number(f"How many such machines{at}", 1, _MAX_ALIKE)
            cards = [self._with_link(entry) for entry in cards]
            between = None
            # Only unlike GPUs of one machine have a link between kinds.
            if len(cards) > 1:
                between = self._link("Between two unlike GPUs of a machine", PATH_GUESSES["PHB"])
            for number in range(alike):
                name = self._node_name(cards[0].gpu, number, alike, which)
                nodes.append(
                    NodeDraft(name, tuple(cards), site, link=between, link_is_measured=True)
                )
        return nodes

    def _cards(self, which: str) -> list[CardsDraft]:
        """Ask for a GPU type and a number, or for several types as 1xRTX-4090+2xRTX-3090."""
        text = self._ask(
            f"GPU of {which} (or `own` for one by its numbers; unlike ones of one machine as "
            "1xRTX-4090+2xRTX-3090)",
            "RTX-4090",
            self._known,
        )
        # The check has passed: each word is COUNTxGPU.
        if "+" in text:
            pairs = [entry.partition("x") for entry in text.split("+")]
            return [self._entry(gpu, int(count)) for count, _, gpu in pairs]
        gpu = self._own_type() if text == "own" else text
        question = f"GPUs in one machine of {which}"
        return [self._entry(gpu, self._number(question, 1, MAX_GPUS_PER_NODE, 4))]

    def _entry(self, gpu: str, count: int) -> CardsDraft:
        return CardsDraft(gpu, count, link_guess(gpu), True, self._own.get(gpu))

    def _with_link(self, cards: CardsDraft) -> CardsDraft:
        if cards.count == 1:
            return cards
        link = self._link(f"Between two GPUs of a machine ({cards.gpu})", link_guess(cards.gpu))
        return replace(cards, link=link)

    def _node_name(self, gpu: str, number: int, alike: int, which: str) -> str:
        stem, place = gpu.lower().replace(".", "-"), number
        # The suggestion is a name that no machine has yet.
        while f"{stem}-{place}" in self._names:
            place += 1

        def check(text: str) -> str:
            if check_host_name(text).lower() in self._names:
                raise ValueError(f'"{text}" is a machine already')
            return text

        of = f" {number + 1} of {alike}" if alike > 1 else ""
        name = self._ask(f"Host name of machine{of} of {which}", f"{stem}-{place}", check)
        self._names.add(name.lower())
        return name

    def _known(self, text: str) -> str:
        if "+" in text:
            return "+".join(self._known_entry(word.strip()) for word in text.split("+"))
        if text == "own" or text in self._own:
            return text
        # The catalogue's spelling is kept, whatever was typed.
        try:
            return gpu_type(text).name
        except ClusterError as error:
            raise ValueError(f"{error} (`own` asks for them)") from None

    def _known_entry(self, text: str) -> str:
        count, _, gpu = text.partition("x")
        if not (count.isascii() and count.isdecimal() and 1 <= int(count) <= MAX_GPUS_PER_NODE):
            raise ValueError(f"{text!r} is not COUNTxGPU, for example 2xRTX-3090")
        if gpu == "own":
            raise ValueError("describe the GPU as a kind of its own first, then name it here")
        return f"{count}x{self._known(gpu)}"

    def _own_type(self) -> str:
        name = self._ask("Its name", "MY-CARD", check_host_name)
        # The usual answers show the form of each value.
        memory = self._ask("Its memory", "24 GB", _unit(parse_bytes))
        bandwidth = self._ask("Its memory bandwidth", "900 GB/s", _unit(parse_bandwidth))
        peak = self._ask("Its dense bf16 peak, without sparsity", "120 TFLOPS", _unit(parse_flops))
        usual = library_of_name(name) or ""
        words = f"Its communication library ({', '.join(LIBRARIES)})"
        library = _library(self._ask(words, usual, _library))
        self._own[name] = TypeDraft(memory, bandwidth, peak, library=library)
        return name

    def _link(self, what: str, usual: tuple[str, str]) -> tuple[str, str]:
        bandwidth = self._ask(
            f"{what}: bandwidth in one direction", usual[0], _unit(parse_bandwidth)
        )
        return bandwidth, self._ask(f"{what}: latency", usual[1], _unit(parse_duration))

    def _number(self, question: str, least: int, most: int, usual: int = 1) -> int:
        def check(text: str) -> str:
            if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
                raise ValueError(f"{text!r} is not a number from {least} to {most}")
            return text

        return int(self._ask(question, str(usual), check))

    def _ask(self, question: str, usual: str, check: Callable[[str], str]) -> str:
        """Ask until the answer passes its check; Enter is the usual one, where there is one."""
        shown = f" [{usual}]" if usual else ""
        while True:
            try:
                # Where no answer is usual, an empty one goes to the check, which explains itself.
                text = self._read(f"{question}{shown}: ").strip() or usual
            except EOFError:
                raise UsageError(
                    f"the answers ended at: {question}; nothing was written. Without a terminal "
                    "give --node or --from-slurm"
                ) from None
            try:
                return check(text)
            except ValueError as error:
                self._say(str(error))


def _library(text: str) -> Library:
    for library in LIBRARIES:
        if text.lower() == library.lower():
            return library
    fault = f"{text!r} is none of" if text else "the name shows no maker; write one of"
    raise ValueError(f"{fault} {', '.join(LIBRARIES)} (NCCL for an NVIDIA GPU, RCCL for AMD's)")


def _unit(parse: Callable[[object], float]) -> Callable[[str], str]:
    """Make a check that keeps the text as written."""

    def check(text: str) -> str:
        try:
            parse(text)
        except UnitError as error:
            raise ValueError(str(error)) from None
        return text

    return check


def _at(site: str, num_sites: int) -> str:
    return f" at {site}" if num_sites > 1 else ""
