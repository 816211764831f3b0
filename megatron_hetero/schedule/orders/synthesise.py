"""A schedule computed for one pipeline: its unequal stages, its slow hops, its memory.

Candidates are 1F1B with the launch counts of the rule or with known ones, 1F1B with counts found by
coordinate search, and greedy lists with whole and with split backward passes, whose limits are
searched likewise.  All are timed by one event model (`schedule.simulator.pipeline` has the same),
so what comes out is never slower there than 1F1B with the counts that it begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_hetero.cost.pipeline import pipeline_time_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.orders.list_schedule import (
    Listed,
    Policy,
    TimedPipeline,
    list_schedule,
)
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts, one_f_one_b
from megatron_hetero.schedule.orders.zero_bubble import POLICIES

# Changes of a single count that a search tries, one after the other.
STEPS = (-1, 1, 2, 3, 4, 6)
MAX_TRIED_PASSES = 3_000_000
"""Work of a search, counted in passes scheduled, not in seconds: equal inputs, equal answers."""

Counts = tuple[int, ...]
Time = Callable[[Counts], float]


def synthesise(
    pipeline: TimedPipeline,
    limits: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
    *,
    split: bool = True,
) -> Listed:
    """Search for the quickest schedule of one pipeline.

    Args:
        limits: micro-batches whose activations each stage can hold (passes, of all its chunks),
            shape [stage]; by default all of them.
        counts: launch counts of 1F1B that are known to be good, shape [stage].
        split: whether backward passes may be split.
    Raises:
        CheckFailedError: no schedule keeps to the limits.
    """
    # No stage holds more passes than it has; the budget bounds the passes simulated in all.
    num_passes = [len(chunks) * pipeline.num_micro_batches for chunks in pipeline.times]
    caps = tuple(min(n, c) for n, c in zip(limits or num_passes, num_passes, strict=True))
    budget = _Budget(MAX_TRIED_PASSES // (3 * sum(num_passes)))
    # 1F1B with good launch counts first: its counts are also good limits for the lists.
    found: list[Listed] = []
    starts = [caps]
    if len(pipeline.chain) == pipeline.num_stages:
        launched = _one_f_one_b(pipeline, caps, counts, budget)
        found += launched
        starts = [_counts(launched[0]), _counts(launched[-1]), caps]
    # Which lists to try: whole or split backward passes, and groups of micro-batches with chunks.
    policies = [replace(p, split=False, patience=0.0) for p in POLICIES if not p.patience]
    if split:
        policies += POLICIES
    if len(pipeline.chain) > pipeline.num_stages:
        policies = [replace(p, group_size=g) for p in policies for g in (0, pipeline.num_stages)]
    found += _lists(pipeline, caps, starts, policies, budget)
    # Not one schedule within memory.
    if not found:
        raise CheckFailedError(
            f"no schedule keeps at most {list(caps)} passes under way on the stages; give more"
        )
    return min(found, key=lambda listed: listed.makespan_s)


class _Budget:
    """The number of schedules that may still be tried."""

    def __init__(self, tries: int) -> None:
        self.tries = max(tries, 1)

    def spend(self) -> bool:
        self.tries -= 1
        return self.tries >= 0


def _one_f_one_b(
    pipeline: TimedPipeline, caps: Counts, known: Sequence[int] | None, budget: _Budget
) -> list[Listed]:
    """Try 1F1B with the rule's launch counts or known counts, and with the best counts nearby."""
    m = pipeline.num_micro_batches
    # 1F1B as the closed form sees it: one pass of each kind, one hop a boundary.
    passes = [
        PassTimes(t.forward_s, t.backward_input_s + t.backward_weight_s) for (t,) in pipeline.times
    ]
    hops = [
        max(f.total_s, b.total_s)
        for f, b in zip(pipeline.forward_hops, pipeline.backward_hops, strict=True)
    ]

    def time_s(counts: Counts) -> float:
        return pipeline_time_s(passes, pipeline.forward_hops, pipeline.backward_hops, m, counts)

    def falling(counts: Sequence[int]) -> Counts:
        """Lower each count to the cap and to the count before."""
        fitting: list[int] = []
        for count, cap in zip(counts, caps, strict=True):
            fitting.append(max(1, min(count, cap, m, *fitting[-1:])))
        return tuple(fitting)

    # Start at the better of both, climb from there.
    rule = falling(launch_counts([p.total_s for p in passes], hops))
    start = min([rule] if known is None else [rule, falling(known)], key=time_s)
    best = _climb(start, time_s, falling, budget)
    return [
        Listed(one_f_one_b(pipeline.num_stages, m, counts), time_s(counts))
        for counts in (start, best)
    ]


def _lists(
    pipeline: TimedPipeline,
    caps: Counts,
    starts: Sequence[Counts],
    policies: Sequence[Policy],
    budget: _Budget,
) -> list[Listed]:
    """Try greedy lists: each policy from each start, and the best of them with better limits."""

    def within(limits: Sequence[int]) -> Counts:
        return tuple(max(1, min(n, cap)) for n, cap in zip(limits, caps, strict=True))

    # Each policy from each start, as far as the budget goes.
    tried: list[tuple[Listed, Policy, Counts]] = []
    for limits in dict.fromkeys(starts):
        for policy in policies:
            if budget.spend() and (listed := _listed(pipeline, limits, policy)) is not None:
                tried.append((listed, policy, limits))
    if not tried:
        return []
    # Improve the limits of the best list by climbing.
    best, policy, limits = min(tried, key=lambda one: one[0].makespan_s)

    def time_s(counts: Counts) -> float:
        listed = _listed(pipeline, counts, policy)
        return float("inf") if listed is None else listed.makespan_s

    better = _listed(pipeline, _climb(limits, time_s, within, budget), policy)
    return [best] if better is None else [best, better]


def _listed(pipeline: TimedPipeline, limits: Counts, policy: Policy) -> Listed | None:
    try:
        return list_schedule(pipeline, limits, policy)
    except CheckFailedError:
        return None


def _climb(
    start: Counts, time_s: Time, fit: Callable[[Sequence[int]], Counts], budget: _Budget
) -> Counts:
    """Improve counts by coordinate search: change one at a time as long as that shortens the
    time."""
    # A change stays only if it gains more than rounding; the search ends after a round without.
    best, best_s = start, time_s(start)
    improved = True
    while improved:
        improved = False
        for stage in range(len(start)):
            for step in STEPS:
                counts = list(best)
                counts[stage] += step
                candidate = fit(counts)
                if candidate == best or not budget.spend():
                    continue
                candidate_s = time_s(candidate)
                if candidate_s < best_s * (1 - 1e-9):
                    best, best_s, improved = candidate, candidate_s, True
    return best


def _counts(listed: Listed) -> Counts:
    """Count the forwards before each stage's first backward in a 1F1B schedule, the launch counts.
    """
    counts = []
    for programme in listed.schedule.programmes:
        kinds = [o.kind for i in programme for o in i if o.kind in ("forward", "backward")]
        counts.append(kinds.index("backward"))
    return tuple(counts)
