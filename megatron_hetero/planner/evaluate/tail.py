"""An estimate of the gradient exchange after the pipelines: rings of holders, and shared paths.

Only few candidates get an exact price of their exchange, and this estimate chooses them.  Every
set of holders is a ring in the order of sites and nodes, and each path carries the rings that cross
it one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_hetero.cost.memory.device import state_bytes
from megatron_hetero.cost.memory.parameters import layer_params
from megatron_hetero.cost.work.share import even_share
from megatron_hetero.planner.completion.completer import Completion
from megatron_hetero.planner.problem import Problem, Unit, divides


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
            ends = [unit for chain in chains for unit in {chain[0], chain[-1]}]
            self._ring(seconds, ends, self.word_bytes)
        elif len(chains) > 1 or is_divided:
            self._ring(seconds, [chain[0] for chain in chains], self.word_bytes)
            self._ring(seconds, [chain[-1] for chain in chains], self.word_bytes)
        if len(chains) > 1 or is_divided:
            starts = [[0, *accumulate(filled.layers)][:-1] for filled in found.filled]
            edges = sorted({start for of in starts for start in of})
            edges.append(sum(found.filled[0].layers))
            groups: dict[tuple[Unit, ...], int] = {}
            for first, end in pairwise(edges):
                holders = tuple(
                    [
                        chain[bisect_right(of, first) - 1]
                        for chain, of in zip(chains, starts, strict=True)
                    ]
                )
                # Sharded layers are exchanged in the passes; all replicas have the same ones.
                stage = bisect_right(starts[0], first) - 1
                whole = end - first - (found.sharded[stage] if found.sharded else 0)
                groups[holders] = groups.get(holders, 0) + whole
            for holders, num_layers in groups.items():
                self._ring(seconds, holders, num_layers * self.layer_bytes)
        return max(seconds.values(), default=0.0)

    def _ring(
        self,
        seconds: dict[tuple[str, str] | str, float],
        holders: Sequence[Unit],
        num_bytes: float,
    ) -> None:
        """Add a ring to the seconds by path (two nodes), and by the line that paths share."""
        groups = [
            self.place[node]
            for unit in holders
            for node, indices in unit.parts
            for _ in range(len(indices) // unit.width)
        ]
        number = len(groups)
        if number < 2:
            return
        width = min([unit.width for unit in holders])
        nodes = sorted(groups)
        part = 2 * (number - 1) / number * num_bytes
        for (_, a), (_, b) in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            per_byte, latency_s = self._edge(a, b)
            scale = 1 / width if a == b else 1.0
            key = (a, b)
            seconds[key] = (
                seconds.get(key, 0.0) + part * scale * per_byte + 2 * (number - 1) * latency_s
            )
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
