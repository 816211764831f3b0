"""Launch counts: how many forwards each stage runs ahead, so that a slow hop hides behind work.

1F1B waits, over a slow hop, for a round trip in every period.  Forwards launched further ahead fill
that time, for the memory of the activations they leave.  A rule gives counts to compare structures
by (`schedule.orders.one_f_one_b.launch_counts`); the least for some periods are where searches
begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, Placement, own_launch_counts
from megatron_hetero.cost.step_cost import PlacementCost, ReplicaCost
from megatron_hetero.rounding import ROUNDING
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts

MIN_GAIN = 0.005
"""Counts of their own must shorten a step by this part: less is not worth a plug-in."""

_PERIODS = (0.5, 0.7, 0.85, 1.0, 1.05, 1.1, 1.2)
"""Periods that counts are made for, in parts of the slowest stage's: shorter ones fill the time
before the first gradient comes, longer ones leave memory for layers."""
WORTH = 1 - 1e-3
"""A step of the search must bring a pipeline's time below this part of it, to be worth memory."""

NEGLIGIBLE_TRIP = 0.01
"""Round trips below this part of a period are not hidden: they lengthen it by half of that."""

Counted = tuple[PlacedReplica, ReplicaCost]


class LaunchRule:
    """Gives replicas launch counts by the rule, as far as memory goes; remembers what it gave."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._counted: dict[int, tuple[ReplicaCost, Counted | None]] = {}
        """By the identity of a replica's own cost: replicas that are alike share one."""

    def apply(
        self, placement: Placement, cost: PlacementCost, vocab_rows: int
    ) -> tuple[Placement, PlacementCost] | None:
        """Return a placement of 1F1B's own counts, with counts on the replicas that hold up the
        step.

        None where no counts, or not those of the rule, gain `MIN_GAIN` of the step.
        """
        if not self.costs.has_launch_counts:
            return None
        # Even without any wait the step would not be `MIN_GAIN` shorter.
        if cost.least_step_s > (1 - MIN_GAIN) * cost.step_time_s:
            return None
        priced = list(zip(placement.replicas, cost.replicas, strict=True))
        costs = self.costs.sharded_as(placement)
        # Replicas without better counts keep their own.
        options = [(own, self._counts(costs, *own, vocab_rows) or own) for own in priced]
        # The network cards may hold up the step whatever the launch counts are.
        pipelines_s = max(cost.card_s, *(counted[1].pipeline_s for _, counted in options))
        saved_s = cost.pipelines_s - pipelines_s
        if saved_s < MIN_GAIN * cost.step_time_s:
            return None
        # Only replicas that are too slow otherwise pay with memory for more launches.
        chosen = [own if own[1].pipeline_s <= pipelines_s else counted for own, counted in options]
        found = with_replicas(costs, chosen, vocab_rows)
        # The step has more in it than its pipelines, so that the gain is checked once more.
        return found if found[1].step_time_s <= (1 - MIN_GAIN) * cost.step_time_s else None

    def _counts(
        self, costs: CostModel, replica: PlacedReplica, cost: ReplicaCost, vocab_rows: int
    ) -> Counted | None:
        """Return the replica with counts that are faster than 1F1B's own, and fit; else None."""
        if id(cost) not in self._counted:
            self._counted[id(cost)] = cost, self._price(costs, replica, cost, vocab_rows)
        _, counted = self._counted[id(cost)]
        # An equal replica on other devices may have been priced.
        return counted and (replace(replica, launch_counts=counted[0].launch_counts), counted[1])

    def _price(
        self, costs: CostModel, replica: PlacedReplica, cost: ReplicaCost, vocab_rows: int
    ) -> Counted | None:
        round_trips_s = [
            there.total_s + back.total_s
            for there, back in zip(cost.forward_hops, cost.backward_hops, strict=True)
        ]
        times_s = [s.times.total_s for s in cost.stages]
        least_s = NEGLIGIBLE_TRIP * max(times_s)
        # A crossing in one direction is half of the trip there and back.
        hops_s = [trip_s / 2 if trip_s > least_s else 0.0 for trip_s in round_trips_s]
        wanted = launch_counts(times_s, hops_s)
        counted = _most_that_fit(costs, replica, wanted, vocab_rows)
        if counted.launch_counts is None:
            return None
        counted_cost = costs.replica(counted, vocab_rows)
        faster = counted_cost.pipeline_s < WORTH * cost.pipeline_s
        return (counted, counted_cost) if faster and counted_cost.fits else None


def with_counts(replica: PlacedReplica, counts: Sequence[int]) -> PlacedReplica:
    """Return the replica with launch counts; 1F1B's own are left unsaid."""
    own = replace(replica, launch_counts=None)
    counts = tuple(counts)
    return own if counts == own.num_in_flight else replace(own, launch_counts=counts)


def with_replicas(
    costs: CostModel, counted: Sequence[Counted], vocab_rows: int
) -> tuple[Placement, PlacementCost]:
    """Return a placement of new launch counts, from replicas already priced."""
    placement = Placement(tuple(replica for replica, _ in counted))
    return placement, costs.combine(placement, tuple(price for _, price in counted), vocab_rows)


def other_counts(
    counts: tuple[int, ...],
    num_micro_batches: int,
    times_s: Sequence[float],
    trips_s: Sequence[float],
    singles: bool = True,
) -> Iterator[tuple[int, ...]]:
    """Yield counts to try instead: the least for shorter and longer periods; then those with one
    stage's changed, and the stages before it as they are, with the least that suits, or changed by
    as much.  May repeat.

    Args:
        times_s: as of `least_counts`, as is `trips_s`.
        singles: also those with one stage's changed.
    """
    slowest_s, last = max(times_s), len(times_s) - 1
    # Least counts for shorter and longer periods than the slowest stage's.
    for part in _PERIODS:
        yield least_counts(times_s, trips_s, part * slowest_s, num_micro_batches, counts[last:])
    # One stage up or down, with earlier stages as they must be, as suits them, or moved along.
    for index, step in product(range(last if singles else 0), (1, -1)):
        moved = moved_counts(counts, index, step, num_micro_batches, False)
        together = moved_counts(counts, index, step, num_micro_batches, True)
        if moved is not None:
            yield moved
            yield least_counts(times_s, trips_s, slowest_s, num_micro_batches, moved[index:])
        if together is not None:
            yield together


def least_counts(
    times_s: Sequence[float],
    trips_s: Sequence[float],
    period_s: float,
    num_micro_batches: int,
    tail: Sequence[int],
) -> tuple[int, ...]:
    """Return the least counts with which a pipeline takes no more than a period for a micro-batch,
    and no fewer than 1F1B's own.

    On the way from stage i to stage j and back, once through all between, a pipeline goes on by
    count i - count j + 1 micro-batches, each of which has a period.

    Args:
        times_s: forward + backward of one micro-batch, shape [stage].
        trips_s: over each boundary and back, shape [stage - 1].
        tail: counts of the last stages, which stay.

    >>> least_counts([1.0, 1.0, 1.0], [0.5, 0.0], 1.0, 8, [1])
    (4, 2, 1)
    >>> least_counts([1.0, 1.0, 1.0], [0.5, 0.0], 1.25, 8, [1])
    (3, 2, 1)
    """
    depth = len(times_s)
    counts = [*[0] * (depth - len(tail)), *tail]
    # From the last stages to the first: each must cover its way to every later one.
    for i in reversed(range(depth - len(tail))):
        # No fewer than 1F1B's own, and no fewer than the next stage's.
        count, way_s = max(depth - i, counts[i + 1]), times_s[i]
        # Around a cycle of stages i to j, count i - count j + 1 micro-batches take `way_s`.
        for j in range(i + 1, depth):
            way_s += trips_s[j - 1] + times_s[j]
            count = max(count, counts[j] - 1 + ceil(way_s / period_s - ROUNDING))
        counts[i] = min(count, num_micro_batches)
    return tuple(counts)


def moved_counts(
    counts: Sequence[int], index: int, step: int, num_micro_batches: int, together: bool
) -> tuple[int, ...] | None:
    """Return counts with one stage's changed by `step`. Counts of the stages before follow as far
    as they must, or with `together` by the same step. None if 1F1B's own counts or the
    micro-batches leave no room."""
    # 1F1B's own counts of the stages up to the changed one.
    own = [min(len(counts) - i, num_micro_batches) for i in range(index + 1)]
    count = counts[index] + step
    least = max(counts[index + 1], own[index])
    # A first stage has no stage before it to move along.
    if not least <= count <= num_micro_batches or (together and not index):
        return None
    more = step if together else 0
    before = zip(counts[:index], own[:index], strict=True)
    heads = (min(max(c + more, fewest, count), num_micro_batches) for c, fewest in before)
    return (*heads, count, *counts[index + 1 :])


def _most_that_fit(
    costs: CostModel, replica: PlacedReplica, wanted: Sequence[int], vocab_rows: int
) -> PlacedReplica:
    """Return the wanted counts, cut to the micro-batches, each stage's memory, and the stage
    before."""
    own = own_launch_counts(len(replica.stages))
    counts = [min(count, replica.num_micro_batches) for count in wanted]
    # A stage launches no more than the stage before it, and as much as its memory holds.
    for index in range(len(counts)):
        if index:
            counts[index] = min(counts[index], counts[index - 1])
        # 1F1B's own count is taken as fitting; beyond it memory decides.
        while counts[index] > own[index]:
            trial = replace(replica, launch_counts=tuple(counts))
            memory = costs.stage_memory(trial, index, vocab_rows)
            if memory.peak_bytes(replica.stages[index].num_layers) <= memory.capacity_bytes:
                break
            counts[index] -= 1
    return with_counts(replica, counts)
