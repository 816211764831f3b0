"""Seconds of one replica's 1F1B pipeline: the exact longest path, and a quick close form.

`schedule.simulator.pipeline` runs any programme; this file is the same model for 1F1B alone, small
enough for the planner's innermost loop (a test holds both equal).  Sends do not block the sender's
computation; a link carries one message per direction at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSequence, Sequence

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.kernels import KERNELS


def pipeline_time_s(
    stages: Sequence[PassTimes],
    forward_hops: Sequence[BoundaryTime],
    backward_hops: Sequence[BoundaryTime],
    num_micro_batches: int,
    launch_counts: Sequence[int] | None = None,
) -> float:
    """Return the makespan of 1F1B (Narayanan et al. 2021, non-interleaved), seconds; see
    `stage_ends_s`.

    Args:
        stages: forward and backward seconds of one micro-batch, shape [stage].
        forward_hops: boundary i carries the activation of stage i to i + 1, shape [stage - 1].
        backward_hops: boundary i carries the gradient of stage i + 1 to i, shape [stage - 1].
        num_micro_batches: of the replica in a step.
        launch_counts: as of `stage_ends_s`.
    """
    return max(stage_ends_s(stages, forward_hops, backward_hops, num_micro_batches, launch_counts))


def stage_ends_s(
    stages: Sequence[PassTimes],
    forward_hops: Sequence[BoundaryTime],
    backward_hops: Sequence[BoundaryTime],
    num_micro_batches: int,
    launch_counts: Sequence[int] | None = None,
) -> tuple[float, ...]:
    """Compute when each stage's last backward pass ends in 1F1B: seconds, shape [stage].

    Args:
        stages: forward and backward seconds of one micro-batch, shape [stage].
        forward_hops: boundary i carries the activation of stage i to i + 1, shape [stage - 1].
        backward_hops: boundary i carries the gradient of stage i + 1 to i, shape [stage - 1].
        launch_counts: forwards that a stage launches before its first backward, shape [stage],
            from 1 to `num_micro_batches`, falling along the pipeline; None is 1F1B's own.

    >>> no_hop = BoundaryTime(0.0, 0.0)
    >>> stage_ends_s([PassTimes(1.0, 2.0)] * 2, [no_hop], [no_hop], 2)
    (9.0, 7.0)
    """
    return ends_s(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        in_rows(forward_hops),
        in_rows(backward_hops),
        num_micro_batches,
        launch_counts,
    )


Hops = tuple[list[float], list[float]]
"""Seconds for which each boundary is busy, and its latency, shape [stage - 1] both."""


def in_rows(hops: Sequence[BoundaryTime]) -> Hops:
    """Return the seconds of boundaries in rows, as `ends_s` takes them."""
    return [hop.serialisation_s for hop in hops], [hop.latency_s for hop in hops]


def ends_s(
    forward_s: list[float],
    backward_s: list[float],
    forward_hops: Hops,
    backward_hops: Hops,
    num_micro_batches: int,
    launch_counts: Sequence[int] | None,
) -> tuple[float, ...]:
    """Return `stage_ends_s`, from rows: quicker for who asks again and again.

    Args:
        forward_s, backward_s: seconds of one micro-batch, shape [stage].
        forward_hops, backward_hops: as of `stage_ends_s`, in rows.
        num_micro_batches: of the replica in a step.
        launch_counts: as of `stage_ends_s`.
    """
    num_stages = len(forward_s)
    if num_stages == 1:
        return (num_micro_batches * (forward_s[0] + backward_s[0]),)
    # 1F1B's own counts unless others are given.
    counts = launch_counts or [min(num_stages - i, num_micro_batches) for i in range(num_stages)]
    # The compiled kernel does the same, faster.
    if KERNELS is not None:
        rows = (forward_s, backward_s, *forward_hops, *backward_hops)
        return KERNELS.stage_ends(*rows, num_micro_batches, counts)
    last = num_stages - 1
    forward_hop = list(zip(*forward_hops, strict=True))
    backward_hop = list(zip(*backward_hops, strict=True))
    # State: when each stage and each direction of a hop is free again.
    free_at = [0.0] * num_stages
    forward_link_free_at = [0.0] * last
    backward_link_free_at = [0.0] * last
    # gradients_at[i]: arrivals at stage i of gradients that it has not taken yet.
    gradients_at: list[deque[float]] = [deque() for _ in range(last)]
    state = (free_at, forward_link_free_at, backward_link_free_at, *gradients_at)
    steady = _Steady(state, counts[0] - 1)
    k, num_rounds = 0, num_micro_batches + counts[0] - 1
    # `_kernels.c` is the same, operation by operation.  Comparisons stand where `max` would be
    # read more easily.
    while k < num_rounds:
        # Forward of micro-batch k down the pipeline.
        if k < num_micro_batches:
            arrival = 0.0
            for i in range(num_stages):
                free = free_at[i]
                free_at[i] = end = (free if free > arrival else arrival) + forward_s[i]
                if i < last:
                    busy_s, latency_s = forward_hop[i]
                    free = forward_link_free_at[i]
                    forward_link_free_at[i] = free = (free if free > end else end) + busy_s
                    arrival = free + latency_s
        # Stage i runs counts[i] - 1 forwards ahead, so round k ends with its backward
        # k - (counts[i] - 1); that of a later stage with the same count comes before it.
        for i in range(last, -1, -1):
            micro_batch = k - counts[i] + 1
            if micro_batch < 0:
                break
            if micro_batch >= num_micro_batches:
                continue
            ready = gradients_at[i].popleft() if i < last else 0.0
            free = free_at[i]
            free_at[i] = end = (free if free > ready else ready) + backward_s[i]
            if i:
                busy_s, latency_s = backward_hop[i - 1]
                free = backward_link_free_at[i - 1]
                backward_link_free_at[i - 1] = free = (free if free > end else end) + busy_s
                gradients_at[i - 1].append(free + latency_s)
        # Between the first backward of stage 0 and its last forward all rounds are alike.
        if counts[0] - 1 <= k < num_micro_batches:
            k += steady.skip(k, num_micro_batches - 1 - k)
        k += 1
    return tuple(free_at)


class _Steady:
    """Shortcut through the rounds of a recurrence that repeats itself.

    What depends on earlier times by `max` and `+` alone goes on as it did: if all times of a round
    are those of `length` rounds before and the same seconds more, so are those of every later round
    (Baccelli et al. 1992, Synchronization and Linearity: such a recurrence becomes
    periodic).  Compared with one round, then with one twice as far on, and so on.
    """

    def __init__(
        self, state: tuple[MutableSequence[float], ...], first: int, tolerance: float = 1e-13
    ) -> None:
        self.state = state
        self.tolerance = tolerance
        self._round = first
        self._length = 1
        self._times: list[float] | None = None

    def skip(self, k: int, rounds_left: int) -> int:
        """Advance the state past rounds after round `k`, at most `rounds_left`; return their
        number."""
        if self._times is None:
            self._remember(k)
            return 0
        length, shift_s = k - self._round, self.state[0][0] - self._times[0]
        if self._has_shifted(shift_s):
            times = rounds_left // length
            for part in self.state:
                for index, time_s in enumerate(part):
                    part[index] = time_s + times * shift_s
            self._remember(k)
            return times * length
        if length >= self._length:
            self._length *= 2
            self._remember(k)
        return 0

    def _has_shifted(self, shift_s: float) -> bool:
        before, within_s = self._times or [], self.tolerance * self.state[0][0]
        first = self.state[0]
        if abs(first[-1] - before[len(first) - 1] - shift_s) > within_s:  # mostly enough
            return False
        now = (time_s for part in self.state for time_s in part)
        pairs = zip(now, before, strict=True)
        return all(abs(after_s - before_s - shift_s) <= within_s for after_s, before_s in pairs)

    def _remember(self, k: int) -> None:
        self._round, self._times = k, [time_s for part in self.state for time_s in part]


def least_pipeline_time_s(
    stages: Sequence[PassTimes],
    forward_hops: Sequence[BoundaryTime],
    backward_hops: Sequence[BoundaryTime],
    num_micro_batches: int,
) -> float:
    """Bound the makespan from below for any launch counts, seconds: all work of one stage, or of
    one direction of a hop, between the first micro-batch's way to it and the last one's way
    back.

    Args:
        stages: forward and backward seconds of one micro-batch, shape [stage].
        forward_hops: boundary i carries the activation of stage i to i + 1, shape [stage - 1].
        backward_hops: boundary i carries the gradient of stage i + 1 to i, shape [stage - 1].
        num_micro_batches: of the replica in a step.
    """
    return LeastPipeline(stages, forward_hops, backward_hops).time_s(num_micro_batches)


class LeastPipeline:
    """The bound of `least_pipeline_time_s` for any number of micro-batches: the highest of straight
    lines."""

    def __init__(
        self,
        stages: Sequence[PassTimes],
        forward_hops: Sequence[BoundaryTime],
        backward_hops: Sequence[BoundaryTime],
    ) -> None:
        # The way to what is busy, its seconds a micro-batch, what else it waits for, the way back.
        self._lines: list[tuple[float, float, float, float]] = []
        there_s = back_s = 0.0
        num_hops = len(forward_hops)
        for i, stage in enumerate(stages):
            forward_s, backward_s = stage.forward_s, stage.backward_s
            self._lines.append((there_s, forward_s + backward_s, 0.0, back_s))
            if i == num_hops:
                break
            there_s += forward_s
            back_s += backward_s
            forward, backward = forward_hops[i], backward_hops[i]
            way_s, back_way_s = forward.total_s, backward.total_s
            for busy_s in (forward.serialisation_s, backward.serialisation_s):
                others_s = way_s + back_way_s - busy_s
                self._lines.append((there_s, busy_s, others_s, back_s))
            there_s += way_s
            back_s += back_way_s

    def time_s(self, num_micro_batches: int) -> float:
        """Return the seconds that so many micro-batches take at least."""
        return max(
            [
                there_s + num_micro_batches * busy_s + others_s + back_s
                for there_s, busy_s, others_s, back_s in self._lines
            ]
        )


def steady_period_s(
    stage_times_s: Sequence[float], round_trips_s: Sequence[float], busiest_link_s: float = 0.0
) -> float:
    """Return the seconds per micro-batch in 1F1B's steady state: the largest mean of any dependency
    cycle.

    The cycle from stage i down to stage j and back passes every stage and hop between once and
    advances j - i + 1 micro-batches (1F1B keeps one more in flight per stage).
    `round_trips_s[i]`: forward plus backward crossing of boundary i.

    >>> steady_period_s([1.0, 2.0], [2.0])  # (1 + 2 + 2) / 2 micro-batches
    2.5
    """
    period_s = max([busiest_link_s, *stage_times_s])
    pairs = zip(stage_times_s[1:], round_trips_s, strict=True)
    further_s = [time_s + trip_s for time_s, trip_s in pairs]
    for i, total_s in enumerate(stage_times_s):
        for length, more_s in enumerate(further_s[i:], 2):
            total_s += more_s
            mean_s = total_s / length
            if mean_s > period_s:
                period_s = mean_s
    return period_s
