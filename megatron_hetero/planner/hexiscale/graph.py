"""The graph that HexiScale's algorithm partitions: GPUs or machines, their speeds, the bandwidths
between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.planner.hexiscale.partition import Weights
from megatron_hetero.planner.problem import Problem

_MAX_GPU_VERTICES = 512
"""With more GPUs than this, whole machines are the vertices of the graph."""


@dataclass(frozen=True)
class Chunk:
    """GPUs of a machine inside one group."""

    node: Node
    indices: tuple[int, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the chunk's properties except names, equal for interchangeable chunks."""
        node = self.node
        return node.gpu_type.name, node.num_gpus, node.link, node.site, len(self.indices)


class HexiScaleGraph:
    """All usable GPUs, or all machines of a large cluster, with speeds and bandwidths."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.nodes = [node for node in problem.nodes if problem.widths[node.name]]
        # Machines as vertices keep the matrix of a large cluster small.
        whole = sum(len(problem.gpus[node.name]) for node in self.nodes) > _MAX_GPU_VERTICES
        self.chunks = [
            Chunk(node, indices)
            for node in self.nodes
            for indices in (
                [problem.gpus[node.name]] if whole else [(i,) for i in problem.gpus[node.name]]
            )
        ]

    @property
    def num_vertices(self) -> int:
        """GPUs, or machines."""
        return len(self.chunks)

    @cached_property
    def speeds(self) -> list[float]:
        """Layers a second of each vertex."""
        costs, found = self.problem.costs, []
        for chunk in self.chunks:
            # The widest possible group is what a machine's GPUs are rated by.
            width = self.problem.widths[chunk.node.name][0]
            rows = costs.vocab_rows([width])
            layer_s = costs.pieces(chunk.node, width, rows).layer.total_s
            found.append(len(chunk.indices) / (width * layer_s))
        return found

    @cached_property
    def bandwidths(self) -> Weights:
        """Messages a second between vertices, relative to the most; zero on the diagonal."""
        place = {node.name: i for i, node in enumerate(self.nodes)}
        between = np.zeros((len(self.nodes), len(self.nodes)))
        for i, node in enumerate(self.nodes):
            for j, other in enumerate(self.nodes[: i + 1]):
                # One GPU has no link to itself.
                if node.num_gpus > 1 or i != j:
                    between[i, j] = between[j, i] = 1 / self.message_s(node, other)
        # From machines to vertices: GPUs of one machine share the machine's row.
        at = [place[chunk.node.name] for chunk in self.chunks]
        made = between[np.ix_(at, at)]
        np.fill_diagonal(made, 0.0)
        return made / made.max() if made.max() > 0 else made

    @cached_property
    def reciprocals(self) -> Weights:
        """Seconds a message, relative to the most: cutting little of this cuts fast links."""
        # A bandwidth of zero is no link, whose reciprocal counts as nothing.
        seconds = np.divide(
            1.0, self.bandwidths, out=np.zeros_like(self.bandwidths), where=self.bandwidths > 0
        )
        return seconds / seconds.max() if seconds.max() > 0 else seconds

    def message_s(self, node: Node, other: Node) -> float:
        """Return seconds of a micro-batch's activation between two GPUs, the slower way."""
        one, two = node.devices[:1], (other.devices[-1],)
        hop = self.problem.costs.hop
        return max(hop(one, two).total_s, hop(two, one).total_s)

    def seconds(self, node: Node, other: Node) -> float:
        """Return `message_s` between machines, zero inside one."""
        return 0.0 if node is other else self.message_s(node, other)
