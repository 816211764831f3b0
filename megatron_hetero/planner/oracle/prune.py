"""Fillings of a structure that may fit and beat a known plan, for exact search.

A stage of t seconds a micro-batch behind stages of together S seconds ends a step of m
micro-batches at S + m t at the earliest, whatever is launched ahead (docs/bound.md).  Boundaries,
gradient exchange and update come on top, and under other prices the stages behind.  A stage that
lacks memory for one micro-batch in flight, with the distributed optimizer's states divided among
as many replicas as there may be, lacks it in every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, product, starmap

from megatron_hetero.cost.pipeline import LeastPipeline
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.planner.completion.filled import placed_replica
from megatron_hetero.planner.oracle.structures import all_structures, compositions
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain
from megatron_hetero.rounding import ROUNDING

Kinds = tuple[tuple[str, int], ...]
"""A chain up to the choice among a node's equal GPUs: (node, width) stage by stage."""
Split = tuple[int, ...]
"""Layers, stage by stage."""
Filling = tuple[tuple[Split, ...], tuple[int, ...]]
"""Layers and micro-batches, replica by replica."""


def wanted_placements(problem: Problem, limit_s: float, max_work: int) -> list[Placement] | None:
    """Return every placement that may fit and take no longer than `limit_s`; None if that is more
    than `max_work`: ways to split layers or micro-batches, whole or in part.  Sets of pipelines and
    placements, which take longer, count once for each layer."""
    pruner = Pruner(problem, limit_s, max_work)
    wanted: list[Placement] = []
    for structure in all_structures(problem):
        # The work of the enumeration itself counts too.
        if not pruner.may_look(problem.num_layers):
            return None
        # Cheap: without looking at splits of the layers.
        if not pruner.may_hold_it(structure):
            continue
        for layers, shares in pruner.fillings(structure):
            if not pruner.may_look(problem.num_layers):
                return None
            replicas = zip(structure, layers, shares, strict=True)
            wanted.append(Placement(tuple(placed_replica(*r) for r in replicas)))
        if pruner.is_over:
            return None
    return wanted


class Pruner:
    """Fillings of a problem's structures that may fit and take no longer than `limit_s`."""

    def __init__(self, problem: Problem, limit_s: float, max_work: int) -> None:
        self.problem = problem
        self.work_left = max_work
        self.limit_s = limit_s * (1 + ROUNDING)
        self._most: dict[Kinds, int] = {}
        self._splits: dict[Kinds, list[tuple[int, Split]]] = {}
        self._times: dict[tuple[str, int, bool, bool], tuple[float, float]] = {}
        self._held: dict[tuple[str, int, bool, bool], int] = {}
        # The fewest states: as many replicas as there may be divide them.
        most_replicas = max(problem.replica_counts(), default=1)
        self._roomiest = problem.costs.sharded_among(most_replicas)

    @property
    def is_over(self) -> bool:
        """Return whether the work ran out before all fillings were seen."""
        return self.work_left < 0

    def may_look(self, work: int = 1) -> bool:
        """Count what is looked at; whether there is work left for it."""
        self.work_left -= work
        return not self.is_over

    def may_hold_it(self, structure: tuple[Chain, ...]) -> bool:
        """Return whether the structure's replicas may do all micro-batches in time."""
        most = [self._most_of(kinds_of(chain)) for chain in structure]
        return min(most) > 0 and sum(most) >= self.problem.num_micro_batches

    def fillings(self, structure: tuple[Chain, ...]) -> Iterator[Filling]:
        """Yield every filling that may be in time; once `is_over`, some are left out."""
        splits = [self._splits_of(chain) for chain in structure]
        # [replica] -> micro-batches in time with its best split.
        most = [max((count for count, _ in of_chain), default=0) for of_chain in splits]
        # Together the replicas cannot do the batch in time.
        if min(most) == 0 or sum(most) < self.problem.num_micro_batches:
            return
        for shares in compositions(self.problem.num_micro_batches, len(structure)):
            if not self.may_look():
                return
            if any(share > limit for share, limit in zip(shares, most, strict=True)):
                continue
            choices = [
                [split for count, split in of_chain if count >= share]
                for of_chain, share in zip(splits, shares, strict=True)
            ]
            for layers in product(*choices):
                yield layers, shares

    def _time(self, kind: tuple[str, int], first: bool, last: bool) -> tuple[float, float]:
        """Return seconds of a stage's ends and of each layer."""
        key = (*kind, first, last)
        if key not in self._times:
            costs = self.problem.costs
            node = self.problem.cluster.node_by_name[kind[0]]
            pieces = costs.pieces(node, kind[1], self.problem.workload.model.vocab_size)
            ends_s = pieces.stage(0, first, last).total_s
            self._times[key] = ends_s, pieces.layer.total_s
        return self._times[key]

    def _most_layers(self, kind: tuple[str, int], first: bool, last: bool) -> int:
        """Return layers that fit at most."""
        key = (*kind, first, last)
        if key not in self._held:
            node = self.problem.cluster.node_by_name[kind[0]]
            # Other widths can only make the padded vocabulary longer.
            rows = self._roomiest.vocab_rows([kind[1]])
            memory = self._roomiest.memory(node, kind[1], first, last, 1, rows)
            self._held[key] = memory.max_layers
        return self._held[key]

    def _stage_limits(self, kinds: Kinds) -> list[int]:
        last = len(kinds) - 1
        return [self._most_layers(kind, s == 0, s == last) for s, kind in enumerate(kinds)]

    def _stage_times(self, kinds: Kinds) -> list[tuple[float, float]]:
        last = len(kinds) - 1
        return [self._time(kind, s == 0, s == last) for s, kind in enumerate(kinds)]

    def _most_of(self, kinds: Kinds) -> int:
        """Return micro-batches in time at most: each stage may hold what it alone allows, with a
        layer in each stage before it."""
        if kinds not in self._most:
            stages = list(zip(self._stage_times(kinds), self._stage_limits(kinds), strict=True))
            # The more micro-batches, the fewer layers are in time: bisection finds the most.
            low, high = 0, self.problem.num_micro_batches
            while low < high:
                count = (low + high + 1) // 2
                # Each stage as if all stages before it had a single layer.
                room, before_s = 0, 0.0
                for (ends_s, layer_s), held in stages:
                    spare_s = self.limit_s - before_s - count * ends_s
                    most = min(spare_s / (count * layer_s), self.problem.num_layers, held)
                    layers = max(0, int(most))
                    if layers == 0:
                        room = 0
                        break
                    room += layers
                    before_s += ends_s + layer_s
                if room >= self.problem.num_layers:
                    low = count
                else:
                    high = count - 1
            self._most[kinds] = low
        return self._most[kinds]

    def _splits_of(self, chain: Chain) -> list[tuple[int, Split]]:
        """Return every split of the layers with the number of micro-batches possible in time, at
        least 1."""
        kinds = kinds_of(chain)
        if kinds not in self._splits:
            stages = list(zip(self._stage_times(kinds), self._stage_limits(kinds), strict=True))
            found = self._extend(stages, (), 0.0, self._most_of(kinds))
            most_of = self._most_with_hops(chain)
            refined = ((most_of(split, most), split) for most, split in found)
            self._splits[kinds] = [(most, split) for most, split in refined if most]
        return self._splits[kinds]

    def _most_with_hops(self, chain: Chain) -> Callable[[Split, int], int]:
        """Return what tells the same of a split with boundaries, up to the number without: no
        launch counts make a pipeline faster than that."""
        costs, vocab_size = self.problem.costs, self.problem.workload.model.vocab_size
        if not costs.has_launch_counts:  # other prices have other pipelines
            return lambda split, most: most
        last = len(chain) - 1
        nodes = self.problem.cluster.node_by_name
        pieces = [costs.pieces(nodes[unit.node], unit.width, vocab_size) for unit in chain]
        devices = [unit.devices for unit in chain]
        forward = [costs.hop(a, b) for a, b in pairwise(devices)]
        backward = [costs.hop(b, a) for a, b in pairwise(devices)]

        @cache
        def times(stage: int, layers: int) -> PassTimes:
            return pieces[stage].stage(layers, stage == 0, stage == last)

        def most_of(split: Split, most: int) -> int:
            # The same bisection with a bound that knows the boundaries.
            bound = LeastPipeline(list(starmap(times, enumerate(split))), forward, backward)
            low, high = 0, most
            while low < high:
                count = (low + high + 1) // 2
                if bound.time_s(count) <= self.limit_s:
                    low = count
                else:
                    high = count - 1
            return low

        return most_of

    def _extend(
        self,
        stages: list[tuple[tuple[float, float], int]],
        split: Split,
        before_s: float,
        most: int,
    ) -> Iterator[tuple[int, Split]]:
        if not self.may_look():
            return
        left = self.problem.num_layers - sum(split)
        stages_left = len(stages) - len(split)
        if not stages_left:
            yield most, split
            return
        (ends_s, layer_s), held = stages[len(split)]
        # The last stage takes what is left; others leave a layer to each stage behind.
        for layers in [left] if stages_left == 1 else range(1, left - stages_left + 2):
            own_s = ends_s + layers * layer_s
            allowed = int(min(most, (self.limit_s - before_s) / own_s))
            # More layers only take longer and more memory.
            if allowed < 1 or layers > held:
                return
            yield from self._extend(stages, (*split, layers), before_s + own_s, allowed)


def kinds_of(chain: Chain) -> Kinds:
    """Return a chain's kinds."""
    return tuple((unit.node, unit.width) for unit in chain)
