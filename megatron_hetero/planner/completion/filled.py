"""The completed stages of one replica and of a whole structure, and the shares of the batch.

A replica's time is a straight line in its number of micro-batches, and shares follow from these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.placing import (
    with_alike_groups,
    with_optimizer_shares,
    with_sharded_layers,
)
from megatron_hetero.hashed import value
from megatron_hetero.kernels import KERNELS
from megatron_hetero.model.training import TokenDispatcher
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.division.layers import minimax
from megatron_hetero.planner.units import Chain, Structure

_HALVINGS = 10
"""Halvings of the interval of a pipeline's least time."""


@value(frozen=True, slots=True)
class Filled:
    """The stages of a replica for one micro-batch size."""

    layers: tuple[int, ...]
    options: tuple[StageOption, ...]
    counts: tuple[int, ...] | None
    size: int
    fill_s: float
    period_s: float

    def quick_time_s(self, num_micro_batches: float) -> float:
        """Estimate the pipeline's time for that many micro-batches."""
        return self.fill_s + (num_micro_batches - 1) * self.period_s


@value(frozen=True, slots=True)
class Completion:
    """A structure with everything needed for a placement, and about when the pipelines end."""

    structure: Structure
    filled: tuple[Filled, ...]
    num_micro_batches: tuple[int, ...]
    quick_s: float
    is_given: bool
    sharded: tuple[int, ...] | None = None
    """Sharded layers of each stage, the same in all replicas; None without any."""
    optimizer_shares: Sequence[Sequence[int | None]] | None = None
    """Relative shares of the optimizer's states, [replica][stage]; None are equal shares."""
    dispatcher: TokenDispatcher | None = None
    """Dispatcher of tokens to experts; None is the job's own."""

    @property
    def layers(self) -> list[tuple[int, ...]]:
        """Of each stage, [replica][stage]."""
        return [filled.layers for filled in self.filled]

    def placement(self, own_size: int) -> Placement:
        """Return its placement; `own_size` is the job's micro-batch size."""
        replicas = []
        for chain, filled, number in zip(
            self.structure, self.filled, self.num_micro_batches, strict=True
        ):
            # Stages with their layers and settings.
            stages = tuple(
                [
                    PlacedStage(
                        unit.devices,
                        n,
                        unit.tensor_shares,
                        option.recompute,
                        option.num_recomputed,
                        context_parallel=unit.context_parallel,
                        expert_shares=option.expert_shares,
                        context_shares=unit.context_shares,
                    )
                    for unit, n, option in zip(chain, filled.layers, filled.options, strict=True)
                ]
            )
            # Launch counts only where they are not 1F1B's own.
            counts = None
            if filled.counts is not None:
                depth = len(chain)
                counts = tuple([min(c, number) for c in filled.counts])
                # 1F1B's counts are written as none, so that equal placements are equal.
                if counts == tuple([min(depth - i, number) for i in range(depth)]):
                    counts = None
            size = None if filled.size == own_size else filled.size
            replicas.append(PlacedReplica(stages, number, counts, size))
        # Owners of states and sharded layers depend on all replicas.
        made = Placement(tuple(replicas), dispatcher=self.dispatcher)
        sizes = [[option.expert_groups for option in filled.options] for filled in self.filled]
        if any(own for of_replica in sizes for own in of_replica):
            dealt = with_alike_groups(made, sizes)
            assert dealt is not None  # the completer fills alike stages alike
            made = dealt
        if self.optimizer_shares or made.has_context_parallel or made.mixes_expert_groups:
            equal = [[None] * len(r.stages) for r in replicas]
            made = with_optimizer_shares(made, self.optimizer_shares or equal)
        return made if self.sharded is None else with_sharded_layers(made, self.sharded)


def placed_replica(chain: Chain, layers: Sequence[int], num_micro_batches: int) -> PlacedReplica:
    """Return a replica as the job's flags say, from its parts."""
    return PlacedReplica(
        tuple(PlacedStage(u.devices, n) for u, n in zip(chain, layers, strict=True)),
        num_micro_batches,
    )


def balanced(
    num_layers: int, times_s: Sequence[Sequence[float]], trips_s: Sequence[float], number: int
) -> tuple[int, ...] | None:
    """Return layers by stage for stages with forwards launched far enough ahead: the slowest stage
    ends early, counting the way there and back; None if the layers do not fit.

    Args:
        times_s: as of `minimax`.
        trips_s: over each boundary and back.
        number: micro-batches.
    """
    # The compiled loop does the same, faster.
    if KERNELS is not None:
        return KERNELS.divide_layers(num_layers, times_s, trips_s, number, _HALVINGS)
    # Start at the split with the fastest slowest stage.
    layers = minimax(num_layers, times_s)
    if layers is None or len(layers) == 1:
        return layers
    # A limit of `most_s` is possible: the split keeps it.
    most_s = least_time_s(
        [times[n - 1] for n, times in zip(layers, times_s, strict=True)], trips_s, number
    )
    # Halve the limit on each stage's end: most layers that end in time, the way included.
    low_s, high_s = 0.0, most_s
    for _ in range(_HALVINGS):
        limit_s = (low_s + high_s) / 2 if low_s else 0.8 * high_s
        made, way_s = [], 0.0
        for index, times in enumerate(times_s):
            # Most layers of the stage whose work, after the way to the stage, ends in time.
            count = bisect_right(times, (limit_s - way_s) / number)
            if not count:
                break
            made.append(count)
            way_s += times[count - 1] + (trips_s[index] if index < len(trips_s) else 0.0)
        # Possible: take surplus layers off the first stages. Otherwise the limit was too low.
        if len(made) == len(times_s) and sum(made) >= num_layers:
            high_s = limit_s
            excess = sum(made) - num_layers
            for index in range(len(made)):
                less = min(excess, made[index] - 1)
                made[index] -= less
                excess -= less
                if not excess:
                    break
            layers = tuple(made)
        else:
            low_s = limit_s
    return layers


def least_time_s(times_s: Sequence[float], trips_s: Sequence[float], number: int) -> float:
    """Bound a pipeline's seconds from below for any launch counts: all work of one stage, after the
    way to it and before the way back.  Quick: `cost.pipeline.least_pipeline_time_s` knows the hops
    as well.

    Args:
        times_s: there and back, shape [stage].
        trips_s: over each boundary and back, shape [stage - 1].
        number: micro-batches.
    """
    way_s = least_s = 0.0
    for time_s, trip_s in zip(times_s, (*trips_s, 0.0), strict=True):
        end_s = way_s + number * time_s
        if end_s > least_s:
            least_s = end_s
        way_s += time_s + trip_s
    return least_s


def shares(num_sequences: int, filled: Sequence[Filled]) -> tuple[tuple[int, ...], float] | None:
    """Return micro-batches of each replica, at least 1, and when the last one ends; None where the
    sizes do not make up the batch."""
    if len({one.size for one in filled}) > 1:
        return _shares_of_unlike(num_sequences, filled)
    # Equal sizes: micro-batches are to be divided.
    total, left_over = divmod(num_sequences, filled[0].size)
    if left_over or total < len(filled):
        return None
    if len(filled) == 1:
        one = filled[0]
        return (total,), one.fill_s + (total - 1) * one.period_s
    # All but a few by the straight lines that they are; the rest one by one to who ends first.
    active = filled
    while True:
        rate = sum([1 / f.period_s for f in active])
        # Replicas that are too slow for a second micro-batch have exactly one.
        end_s = (
            total
            - (len(filled) - len(active))
            - len(active)
            + sum([f.fill_s / f.period_s for f in active])
        ) / rate
        still = [f for f in active if f.fill_s < end_s]
        if len(still) == len(active) or not still:
            break
        active = still
    # Whole parts first, then the rest by who ends first.
    counts = [max(1, int((end_s - f.fill_s) / f.period_s)) for f in filled]
    left = total - sum(counts)
    # Rounding gave more than there are: then all start from one.
    if left < 0:
        counts, left = [1] * len(filled), total - len(filled)
    # By when each would end with one more.
    heap = [
        (f.fill_s + n * f.period_s, i) for i, (f, n) in enumerate(zip(filled, counts, strict=True))
    ]
    heapify(heap)
    for _ in range(left):
        next_s, i = heappop(heap)
        counts[i] += 1
        heappush(heap, (next_s + filled[i].period_s, i))
    quick_s = max([f.fill_s + (n - 1) * f.period_s for f, n in zip(filled, counts, strict=True)])
    return tuple(counts), quick_s


def _shares_of_unlike(
    num_sequences: int, filled: Sequence[Filled]
) -> tuple[tuple[int, ...], float] | None:
    """Return shares in unlike sizes: one at a time goes to the replica that would then end first,
    of those whose size is still left."""
    counts = [1] * len(filled)
    # What is left beyond one micro-batch for each replica.
    left = num_sequences - sum([f.size for f in filled])
    heap = [(f.fill_s + f.period_s, i) for i, f in enumerate(filled)]
    heapify(heap)
    while left > 0 and heap:
        end_s, i = heappop(heap)
        # A size that does not fit any more drops out, and so does its replica.
        if filled[i].size <= left:
            counts[i] += 1
            left -= filled[i].size
            heappush(heap, (end_s + filled[i].period_s, i))
    if left:
        return None
    quick_s = max([f.fill_s + (n - 1) * f.period_s for f, n in zip(filled, counts, strict=True)])
    return tuple(counts), quick_s
