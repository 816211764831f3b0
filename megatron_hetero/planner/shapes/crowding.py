"""Seconds for which messages between stages take each path between nodes, and each line of several.

Replicas that are laid out alike often send all their activations from one node to one other, while
as good a path between two like nodes is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.node_links import NodePair
from megatron_hetero.cost.network.lines import line_seconds
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Unit

Path = NodePair | str
"""Pair of nodes, or the name of a line shared by several pairs."""
Place = tuple[int, int]
"""(replica, stage)."""


def busiest_s(problem: Problem, chains: Sequence[Chain], micro_batches: Sequence[int]) -> float:
    """Return the seconds for which boundaries of some chains take the busiest path between nodes.

    Args:
        micro_batches: of each chain.
    """
    return max(PathTraffic(problem, chains, micro_batches).seconds.values(), default=0.0)


class PathTraffic:
    """Seconds for which the boundaries of some chains take each path between nodes."""

    def __init__(
        self, problem: Problem, chains: Sequence[Chain], micro_batches: Sequence[int]
    ) -> None:
        self.chains = [list(chain) for chain in chains]
        self.seconds: dict[Path, float] = {}
        self._costs = problem.costs
        self._micro_batches = micro_batches
        self._message_s: dict[tuple[object, ...], list[tuple[Path, float]]] = {}
        for r, chain in enumerate(chains):
            for boundary in range(len(chain) - 1):
                self.add(self.seconds, (r, boundary), 1)

    def add(self, found: dict[Path, float], boundary: Place, sign: int) -> None:
        """Add a boundary's messages there and back to the seconds of each path, times `sign`."""
        r, s = boundary
        one, other = self.chains[r][s : s + 2]
        if one.node == other.node or one.beyond or other.beyond:
            return  # what units of several nodes send takes several paths
        count = sign * self._micro_batches[r]
        for path, seconds in (*self.message(one, other), *self.message(other, one)):
            found[path] = found.get(path, 0.0) + count * seconds

    def message(self, here: Unit, there: Unit) -> list[tuple[Path, float]]:
        """Return the paths of a message between groups, and the seconds on each path."""
        key = here.node, here.form, there.node, there.form
        # Like groups on the same two nodes send alike.
        if key not in self._message_s:
            hop = self._costs.stage_hop(here.stage, there.stage)
            pair = here.node, there.node
            carried = [(pair, size) for *_, size in hop.parts]
            lines = line_seconds(self._costs.cluster, carried)
            self._message_s[key] = [(pair, hop.on_path_s), *lines.items()]
        return self._message_s[key]
