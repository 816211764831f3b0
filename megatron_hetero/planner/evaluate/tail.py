"""An estimate of the gradient exchange after the pipelines: rings of holders, and shared paths.

Only few candidates get an exact price of their exchange, and this estimate chooses them.  Every
set of holders is a ring in the order of sites and nodes, and each path carries the rings that cross
it one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Self

from megatron_hetero.cost.memory.device import state_bytes
from megatron_hetero.cost.memory.parameters import layer_params
from megatron_hetero.cost.work.share import even_share
from megatron_hetero.planner.completion.completer import Completion
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


class Tails:
    """Estimates for one problem."""

    def __init__(self, problem: Problem) -> None:
        cluster, workload = problem.cluster, problem.workload
        model, training = workload.model, workload.training
        states = state_bytes(training)
        element = float(states.gradient)
        if training.use_distributed_optimizer:
            element = (states.gradient + states.weight) / 2
        self.layer_bytes = layer_params(model, even_share(model, 1)) * element
        self.word_bytes = model.vocab_size * model.hidden_size * element
        self.tied = model.tied_embeddings
        self.links = cluster.node_links
        self.place = {node.name: (node.site, node.name) for node in cluster.nodes}
        self.node_of = cluster.node_by_name
        self.has_lines, self.lines = cluster.has_lines, cluster.lines
        self._edges: dict[tuple[str, str], tuple[float, float]] = {}

    def estimate_s(self, found: Completion) -> float:
        """Return seconds of the gradient exchange, about."""
        chains = found.structure
        seconds: dict[tuple[str, str] | str, float] = {}
        is_divided = divides(chains)
        if self.tied:
            ends = [unit for own in chains for unit in {own[0], own[-1]}]
            self._ring(seconds, [_Holders.of(ends)], self.word_bytes)
        elif len(chains) > 1 or is_divided:
            for index in (0, -1):
                ends = [own[index] for own in chains]
                self._ring(seconds, [_Holders.of(ends)], self.word_bytes)
        if len(chains) > 1 or is_divided:
            alike: dict[tuple[int, ...], list[Chain]] = {}
            for own, filled in zip(chains, found.filled, strict=True):
                alike.setdefault(filled.layers, []).append(own)
            starts = [[0, *accumulate(layers)][:-1] for layers in alike]
            holders = [
                [_Holders.of(units) for units in zip(*of, strict=True)] for of in alike.values()
            ]
            edges = sorted({start for of in starts for start in of})
            edges.append(sum(found.filled[0].layers))
            groups: dict[tuple[int, ...], int] = {}
            for first, end in pairwise(edges):
                stages = tuple([bisect_right(of, first) - 1 for of in starts])
                # Sharded layers are exchanged in the passes; all replicas have the same ones.
                whole = end - first - (found.sharded[stages[0]] if found.sharded else 0)
                groups[stages] = groups.get(stages, 0) + whole
            for stages, num_layers in groups.items():
                held = [of[stage] for of, stage in zip(holders, stages, strict=True)]
                self._ring(seconds, held, num_layers * self.layer_bytes)
        return max(seconds.values(), default=0.0)

    def _ring(
        self,
        seconds: dict[tuple[str, str] | str, float],
        holders: Sequence[_Holders],
        num_bytes: float,
    ) -> None:
        """Add a ring to the seconds by path (two nodes), and by the line that paths share."""
        on_node = Counter(chain.from_iterable([of.nodes for of in holders]))
        number = on_node.total()
        if number < 2:
            return
        width = min([of.width for of in holders])
        nodes = sorted(on_node, key=self.place.__getitem__)
        part, latencies = 2 * (number - 1) / number * num_bytes, 2 * (number - 1)
        for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            inside = on_node[a] - (a != b)
            if inside:
                per_byte, latency_s = self._edge(a, a)
                once_s = part / width * per_byte + latencies * latency_s
                seconds[a, a] = seconds.get((a, a), 0.0) + inside * once_s
            if a == b:
                continue
            per_byte, latency_s = self._edge(a, b)
            once_s = part * per_byte + latencies * latency_s
            seconds[a, b] = seconds.get((a, b), 0.0) + once_s
            for line in self.lines(a, b) if self.has_lines else ():
                taken_s = seconds.get(line.name, 0.0)
                seconds[line.name] = taken_s + part / line.bytes_per_s

    def _edge(self, a: str, b: str) -> tuple[float, float]:
        key = (a, b)
        found = self._edges.get(key)
        if found is None:
            link = self.node_of[a].link if a == b else self.links[a, b]
            found = self._edges[key] = 1 / link.bytes_per_s, link.latency_s
        return found
