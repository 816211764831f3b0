"""An estimate of the gradient exchange after the pipelines: rings of holders, and shared paths.

Only few candidates get an exact price of their exchange, and this estimate chooses them.  Every
set of holders is a ring in the order of sites and nodes, and each path carries the rings that cross
it one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Self

from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.parameters import further_params, layer_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.problem import Chain, Problem, Unit, divides


class _Holders(NamedTuple):
    """Groups that hold the same layers: the node of each, and the width of the narrowest."""

    nodes: tuple[str, ...]
    width: int

    @classmethod
    def of(cls, units: Sequence[Unit]) -> Self:
        """Return the groups of some units."""
        nodes = tuple([node for unit in units for node in unit.group_nodes])
        return cls(nodes, min([unit.width for unit in units]))


@dataclass(eq=False)
class _Ring:
    """A ring of holders: what of its bytes each of its ways carries, and among how many GPUs they
    are divided inside a node.

    Of each path inside a node, how often it is taken, seconds a byte and those of all latencies;
    the same of paths between nodes, which are taken once; and of lines that paths share their
    speed.
    """

    factor: float
    width: int
    inside: list[tuple[int, int, float, float]] = field(default_factory=list)
    between: list[tuple[int, float, float]] = field(default_factory=list)
    lines: list[tuple[int, float]] = field(default_factory=list)


class Tails:
    """Estimates for one problem."""

    def __init__(self, problem: Problem) -> None:
        cluster, workload = problem.cluster, problem.workload
        model, training = workload.model, workload.training
        states = state_bytes(training)
        element = float(states.gradient)
        # With the distributed optimizer, gradients go one way and weights come back.
        if training.use_distributed_optimizer:
            element = (states.gradient + states.weight) / 2
        self.layer_bytes = layer_params(model, even_share(model, 1)) * element
        words = model.vocab_size * model.hidden_size
        further = further_params(model, even_share(model, 1))
        self.copies_words = model.copies_words
        self.word_bytes = words * element
        """Bytes of the word embedding; last stages may have a copy."""
        self.behind_bytes = (further + (0 if model.tied_embeddings else words)) * element
        """Bytes behind the layers of last stages."""
        self.links = cluster.node_links
        self.place = {node.name: (node.site, node.name) for node in cluster.nodes}
        self.node_of = cluster.node_by_name
        self.has_lines, self.lines = cluster.has_lines, cluster.lines
        self._rings: dict[tuple[_Holders, ...], _Ring] = {}
        self._paths: dict[tuple[str, ...], int] = {}
        """Numbers of paths between two nodes, or inside one, and of lines."""
        self._edges: dict[tuple[str, str], tuple[float, float]] = {}

    def estimate_s(self, found: Completion) -> float:
        """Return seconds of the gradient exchange, about."""
        chains = found.structure
        seconds: dict[int, float] = {}
        is_divided = divides(chains)
        # Word embeddings: one exchange of both ends with a copy, one for each end otherwise.
        exchanges = len(chains) > 1 or is_divided
        if self.copies_words:
            ends = [unit for own in chains for unit in {own[0], own[-1]}]
            self._take(seconds, (_Holders.of(ends),), self.word_bytes)
        elif exchanges:
            self._take(seconds, (_Holders.of([own[0] for own in chains]),), self.word_bytes)
        if exchanges and self.behind_bytes:
            self._take(seconds, (_Holders.of([own[-1] for own in chains]),), self.behind_bytes)
        # Layers: runs with the same stages in all replicas have the same holders.
        if exchanges:
            # Replicas with equal layers on their stages have all runs in common.
            alike: dict[tuple[int, ...], list[Chain]] = {}
            for own, filled in zip(chains, found.filled, strict=True):
                alike.setdefault(filled.layers, []).append(own)
            starts = [[0, *accumulate(layers)][:-1] for layers in alike]
            holders = [
                [_Holders.of(units) for units in zip(*of, strict=True)] for of in alike.values()
            ]
            # Layers at which some replica's next stage begins.
            edges = sorted({start for of in starts for start in of})
            edges.append(sum(found.filled[0].layers))
            groups: dict[tuple[int, ...], int] = {}
            for first, end in pairwise(edges):
                # The stage of each kind of replica that holds the run.
                stages = tuple([bisect_right(of, first) - 1 for of in starts])
                # Sharded layers are exchanged in the passes; all replicas have the same ones.
                whole = end - first - (found.sharded[stages[0]] if found.sharded else 0)
                groups[stages] = groups.get(stages, 0) + whole
            # Each run loads the rings of its holders.
            for stages, num_layers in groups.items():
                held = tuple([of[stage] for of, stage in zip(holders, stages, strict=True)])
                self._take(seconds, held, num_layers * self.layer_bytes)
        return max(seconds.values(), default=0.0)

    def _take(
        self, seconds: dict[int, float], holders: tuple[_Holders, ...], num_bytes: float
    ) -> None:
        """Add an exchange around a ring to the seconds by path, and by the line that paths
        share."""
        ring = self._rings.get(holders)
        if ring is None:
            ring = self._rings[holders] = self._ring(holders)
        part = ring.factor * num_bytes
        # Inside a node each GPU of the narrowest group carries its part.
        parts = part / ring.width
        for path, inside, per_byte, latency_s in ring.inside:
            taken_s = inside * (parts * per_byte + latency_s)
            seconds[path] = seconds.get(path, 0.0) + taken_s
        for path, per_byte, latency_s in ring.between:
            seconds[path] = seconds.get(path, 0.0) + (part * per_byte + latency_s)
        for path, bytes_per_s in ring.lines:
            seconds[path] = seconds.get(path, 0.0) + part / bytes_per_s

    def _ring(self, holders: Sequence[_Holders]) -> _Ring:
        """Return the ring's use of paths, with the groups of each node side by side."""
        on_node = Counter(chain.from_iterable([of.nodes for of in holders]))
        number = on_node.total()
        # Around a ring each path carries 2 (n - 1) / n of the bytes.
        ring = _Ring(2 * max(number - 1, 0) / max(number, 1), min([of.width for of in holders]))
        nodes = sorted(on_node, key=self.place.__getitem__) if number > 1 else []
        latencies = 2 * (number - 1)
        for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            # Groups of one node pass on inside it, the last of them to the next node.
            inside = on_node[a] - (a != b)
            if inside:
                per_byte, latency_s = self._edge(a, a)
                ring.inside.append((self._path(a, a), inside, per_byte, latencies * latency_s))
            if a == b:
                continue
            per_byte, latency_s = self._edge(a, b)
            ring.between.append((self._path(a, b), per_byte, latencies * latency_s))
            for line in self.lines(a, b) if self.has_lines else ():
                ring.lines.append((self._path(line.name), line.bytes_per_s))
        return ring

    def _path(self, *name: str) -> int:
        return self._paths.setdefault(name, len(self._paths))

    def _edge(self, a: str, b: str) -> tuple[float, float]:
        key = (a, b)
        found = self._edges.get(key)
        if found is None:
            link = self.node_of[a].link if a == b else self.links[a, b]
            found = self._edges[key] = 1 / link.bytes_per_s, link.latency_s
        return found
