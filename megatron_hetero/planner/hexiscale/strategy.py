"""HexiScale's algorithm (Yan et al., arXiv 2409.01143), as a comparison for our plans.

Rounds over the number of pipelines: partition the graph of all GPUs into pipelines balanced by
speed, partition each pipeline into groups, order the groups by bandwidth, cut each group's machines
into tensor-parallel stages.  A switch says which links the first partition cuts: slow ones
(pipelines stay where links are fast) or fast ones (replicas of a layer stand next to each other).
A moving average of what each position has cost decides between them.

Where the released code differs from what it means to do, this does what it means: layers are
divided by speed within memory (not by memory), each pipeline gets micro-batches by its speed, the
order of the groups is the best one and is the one used, no stage is empty, machines may have any
number of GPUs, and nothing is left to chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.columns.shortest_paths import shortest_paths
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.hexiscale.graph import Chunk, HexiScaleGraph
from megatron_hetero.planner.hexiscale.partition import partition
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Unit

_MAX_GROUPS = 3
"""Parts of a pipeline; the released search draws one to three."""


class HexiScale:
    """Graph partitioning into pipelines and groups, in rounds; see the module."""

    name = "hexiscale"

    def __init__(self, num_rounds: int = 60) -> None:
        self.num_rounds = num_rounds

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        graph = HexiScaleGraph(board.problem)
        builder = _Builder(board.problem, graph)
        switch = _Switch()
        rounds = 0
        for num_pipelines in _pipeline_counts(board, graph.num_vertices):
            for num_groups in range(1, _MAX_GROUPS + 1):
                for cuts_fast in switch.positions():
                    chains = builder.chains(num_pipelines, num_groups, cuts_fast)
                    placement = builder.placement(chains) if chains else None
                    if placement is not None:
                        candidate = board.score(placement, self.name, whole=True)
                    else:
                        candidate = None
                    best = board.best
                    if candidate is not None and best is not None:
                        switch.learn(cuts_fast, candidate.step_time_s / best.step_time_s)
                    rounds += 1
                    if rounds >= self.num_rounds:
                        return


class _Switch:
    """Which links to cut: both until both are known, then the one that has cost less lately."""

    def __init__(self) -> None:
        self._average: dict[bool, float] = {}

    def positions(self) -> tuple[bool, ...]:
        """Return what the next round tries."""
        if len(self._average) < 2:
            return False, True
        return (self._average[True] < self._average[False],)

    def learn(self, cuts_fast: bool, cost: float) -> None:
        """`cost`: step time relative to the best so far."""
        past = self._average.get(cuts_fast, cost)
        self._average[cuts_fast] = (past + cost) / 2


def _pipeline_counts(board: Scoreboard, num_vertices: int) -> Iterator[int]:
    """Yield powers of two and the largest, then the unseen neighbours of the best so far."""
    # Each pipeline needs a vertex at least.
    allowed = [n for n in board.problem.replica_counts() if n <= num_vertices]
    if not allowed:
        return
    # Seen counts, so that neighbours of the best come once.
    seen = []
    ladder = {n for n in allowed if n & (n - 1) == 0} | {allowed[0], allowed[-1]}
    for n in sorted(ladder):
        seen.append(n)
        yield n
    while len(seen) < len(allowed):
        # The best may change while the caller prices, and with it the next neighbour.
        best = len(board.best.placement.replicas) if board.best else allowed[0]
        n = min((n for n in allowed if n not in seen), key=lambda n: (abs(n - best), n))
        seen.append(n)
        yield n


class _Builder:
    """From a number of pipelines to their chains; remembers choices for equal pipelines."""

    def __init__(self, problem: Problem, graph: HexiScaleGraph) -> None:
        self.problem = problem
        self.graph = graph
        self.own_flags = OwnFlags(problem)
        self._parts: dict[tuple[int, bool], tuple[tuple[int, ...], ...]] = {}
        self._chosen: dict[tuple[object, ...], tuple[bool, tuple[int, ...]] | None] = {}

    def chains(self, num_pipelines: int, num_groups: int, cuts_fast: bool) -> list[Chain] | None:
        """Return the chain of every pipeline; None where one has no allowed chain."""
        key = (num_pipelines, cuts_fast)
        if key not in self._parts:
            graph = self.graph
            # Cutting slow links is keeping the weight of bandwidth inside; fast links the reverse.
            edges = graph.reciprocals if cuts_fast else graph.bandwidths
            self._parts[key] = partition(graph.speeds, edges, num_pipelines)
        chains = []
        for part in self._parts[key]:
            chain = self._chain(self._groups(part, num_groups), num_pipelines)
            if chain is None:
                return None
            chains.append(chain)
        return chains

    def placement(self, chains: Sequence[Chain]) -> Placement | None:
        """Return the pipelines with layers and micro-batches; None where the batch or the limits
        do not allow so many."""
        filled = [self.own_flags.nearest(chain, len(chains))[1] for chain in chains]
        return self.own_flags.placement(chains, filled)

    def _groups(self, part: Sequence[int], num_groups: int) -> list[list[Chunk]]:
        """Return a pipeline's vertices in at most `num_groups` groups that keep fast links inside,
        each group as chunks of machines."""
        graph = self.graph
        bandwidths = graph.bandwidths[np.ix_(part, part)]
        speeds = [graph.speeds[vertex] for vertex in part]
        groups = []
        for members in partition(speeds, bandwidths, min(num_groups, len(part))):
            # Vertices of one machine are one chunk.
            indices: dict[str, list[int]] = {}
            for member in members:
                chunk = graph.chunks[part[member]]
                indices.setdefault(chunk.node.name, []).extend(chunk.indices)
            nodes = self.problem.cluster.node_by_name
            groups.append(
                [Chunk(nodes[name], tuple(sorted(held))) for name, held in indices.items()]
            )
        return groups

    def _chain(self, groups: Sequence[Sequence[Chunk]], num_pipelines: int) -> Chain | None:
        """Return the best of the widest walks through the groups, with the best widths on each."""
        best: tuple[tuple[bool, float, Chain], Chain] | None = None
        num_micro_batches = self.problem.num_micro_batches / num_pipelines
        for walk in self._walks(groups):
            # Equal walks have equal choices, whatever the machines are called.
            key = (*(chunk.kind for chunk in walk), num_pipelines)
            if key not in self._chosen:
                self._chosen[key] = self._choose(walk, num_micro_batches)
            chosen = self._chosen[key]
            if chosen is None:
                continue
            backwards, widths = chosen
            chain = self._cut(walk, widths, backwards)
            # The chain itself breaks ties, so that the order of the walks does not matter.
            rank = (*self._rank(chain, num_micro_batches), chain)
            if best is None or rank < best[0]:
                best = rank, chain
        return best[1] if best else None

    def _walks(self, groups: Sequence[Sequence[Chunk]]) -> Iterator[list[Chunk]]:
        """Yield orders of the groups by the time between neighbours, and of each group's
        machines."""
        seconds = self.graph.seconds
        inside = []
        for group in groups:
            nodes = [chunk.node for chunk in group]
            order = shortest_paths([[seconds(a, b) for b in nodes] for a in nodes])[0]
            inside.append([group[i] for i in order])
        # The nearest pair of ends decides between two groups.
        ends = [(group[0].node, group[-1].node) for group in inside]
        between = [[min(seconds(a, b) for a in one for b in two) for two in ends] for one in ends]
        for walk in shortest_paths(between):
            yield [chunk for i in walk for chunk in inside[i]]

    def _choose(
        self, walk: Sequence[Chunk], num_micro_batches: float
    ) -> tuple[bool, tuple[int, ...]] | None:
        """Return direction and width of each chunk, changing one chunk at a time while the step
        gets shorter.

        Width 0 leaves a chunk idle, as the released search does with stages that it leaves empty.
        """
        menus = [
            [w for w in self.problem.widths[chunk.node.name] if w <= len(chunk.indices)]
            for chunk in walk
        ]
        if not all(menus):
            # A chunk too small for any width has no place in the chain.
            return None
        best: tuple[tuple[bool, float], tuple[bool, tuple[int, ...]]] | None = None
        # From the narrowest and from the widest groups, in both directions.
        starts = {tuple(menu[0] for menu in menus), tuple(menu[-1] for menu in menus)}
        for widths in sorted(starts):
            for backwards in (False, True):
                found = self._climb(walk, menus, widths, backwards, num_micro_batches)
                if found is not None and (best is None or found < best):
                    best = found
        return best[1] if best else None

    def _climb(
        self,
        walk: Sequence[Chunk],
        menus: Sequence[Sequence[int]],
        widths: tuple[int, ...],
        backwards: bool,
        num_micro_batches: float,
    ) -> tuple[tuple[bool, float], tuple[bool, tuple[int, ...]]] | None:
        def rank(choice: tuple[int, ...]) -> tuple[bool, float]:
            return self._rank(self._cut(walk, choice, backwards), num_micro_batches)

        best, best_rank = widths, rank(widths)
        improved = True
        while improved:
            improved = False
            for at, menu in enumerate(menus):
                # Width 0 leaves the chunk out.
                for width in (*menu, 0):
                    choice = (*best[:at], width, *best[at + 1 :])
                    if choice != best and (found := rank(choice)) < best_rank:
                        best, best_rank, improved = choice, found, True
        return None if best_rank[1] == float("inf") else (best_rank, (backwards, best))

    def _rank(self, chain: Chain, num_micro_batches: float) -> tuple[bool, float]:
        """Return (does not fit, seconds), or infinity for a chain that the limits forbid."""
        problem = self.problem
        if not problem.chain_is_allowed(chain):
            # Too many stages: fewer are nearer to what is allowed.
            return True, float("inf")
        fits, filled = self.own_flags.nearest(chain)
        return not fits, filled.quick_time_s(num_micro_batches)

    def _cut(self, walk: Sequence[Chunk], widths: Sequence[int], backwards: bool) -> Chain:
        """Return every chunk in units of the given width, the remainder in the widest units that
        fit."""
        chain: list[Unit] = []
        for chunk, width in zip(walk, widths, strict=True):
            left = list(chunk.indices)
            while left:
                fitting = [w for w in self.problem.widths[chunk.node.name] if w <= len(left)]
                # The widest width that fits the remaining GPUs, up to the chosen one.
                taken = max((w for w in fitting if w <= width), default=0)
                if not taken:
                    break
                chain.append(Unit(chunk.node.name, tuple(left[:taken])))
                left = left[taken:]
        return tuple(reversed(chain)) if backwards else tuple(chain)
