"""End times of exchanges that share paths, each priced whole: the simulator's quick form."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from math import ceil

import numpy as np

from megatron_hetero.cost.network.holder_flow import Flow
from megatron_hetero.cost.sync.buckets import StageId

BUFFERS_AT_ONCE = 2
"""Buckets of a rank under way at a time that need buffers of their own
(`runtime.gradients.sync`)."""

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class ExchangeStep:
    """One exchange, bucket by bucket; all but the last are `bucket_share` of it.

    Its first bucket is complete at `first_s`, its last one at `last_s`.  `holders`: of those that
    come to all their exchanges together one is enough.  `buffers`: those of a holder's
    `BUFFERS_AT_ONCE` that one bucket takes; empty where it needs none.
    """

    holders: tuple[StageId, ...]
    flow: Flow
    first_s: float
    last_s: float
    bucket_share: float = 1.0
    buffers: Mapping[StageId, int] = field(default_factory=dict)

    @property
    def window(self) -> int:
        """Return how many of its buckets are under way at a time."""
        return BUFFERS_AT_ONCE // max(self.buffers.values(), default=1)

    @property
    def num_buckets(self) -> int:
        """Count the buckets of the whole exchange."""
        return max(1, ceil(1 / self.bucket_share - _ROUNDING))

    @cached_property
    def longest_s(self) -> float:
        """Return the seconds of its busiest path."""
        return float(self.flow.seconds.max(initial=0.0))

    @property
    def last_bucket_s(self) -> float:
        """Return the seconds of its last bucket on its busiest path."""
        return self.longest_s * (1 - (self.num_buckets - 1) * self.bucket_share)

    @property
    def period_s(self) -> float:
        """Return the seconds from the end of the last bucket but one to that of the last."""
        return max(self.last_bucket_s, (self.last_bucket_s + self.flow.latency_s) / self.window)


class _BusyPaths:
    """Times at which each path of some exchanges is free again.

    Args:
        carried: seconds, by path, for which something else takes it before the last of them is
            done.
    """

    def __init__(self, steps: Sequence[ExchangeStep], carried: Mapping[int, float]) -> None:
        paths, own = np.unique(np.concatenate([s.flow.paths for s in steps]), return_inverse=True)
        self._free_s = np.zeros(len(paths))
        taken_s = np.concatenate([step.flow.seconds for step in steps])
        busy_s = np.bincount(own, taken_s, len(paths))
        if carried and len(paths):
            numbers = np.array(sorted(carried))
            places = np.searchsorted(paths, numbers)
            places[places == len(paths)] = 0
            known = paths[places] == numbers
            seconds = np.array([carried[number] for number in numbers.tolist()])
            busy_s[places[known]] += seconds[known]
        self.busiest_s = float(busy_s.max(initial=0.0))
        """Seconds for which the busiest path is taken in all: no end comes before."""
        ends = np.cumsum([len(step.flow.paths) for step in steps])[:-1]
        self._own = np.split(own, ends)

    def take(self, number: int, step: ExchangeStep, begin_s: float) -> float:
        """Take all paths of a step, each as soon as it is free; return the exchange's end.

        Args:
            number: the step's place among all.
        """
        own = self._own[number]
        ends_s = np.maximum(self._free_s[own], begin_s) + step.flow.seconds
        self._free_s[own] = ends_s
        end_s = float(ends_s.max(initial=begin_s))
        latency_s = step.flow.latency_s
        if step.buffers and step.num_buckets > 1:
            # A full window waits for the latency of its buckets where their bytes do not cover it.
            bucket_s = step.longest_s * step.bucket_share
            wait_s = (bucket_s + latency_s) / step.window - bucket_s
            end_s += (step.num_buckets - 1) * max(0.0, wait_s)
        return max(end_s, step.last_s + step.last_bucket_s) + latency_s


def last_end_s(steps: Sequence[ExchangeStep], carried: Mapping[int, float] | None = None) -> float:
    """Compute when the last exchange is done, seconds; 0 where there are none.

    Args:
        steps: in the order in which each holder comes to its own.
        carried: seconds, by path, for which it carries something else since time 0.
    """
    if not steps:
        return 0.0
    paths = _BusyPaths(steps, carried or {})
    if any(step.buffers for step in steps):
        return max(_windowed(steps, paths), paths.busiest_s)
    by_begin = sorted(enumerate(steps), key=lambda entry: entry[1].first_s)
    last_s = max(paths.take(number, step, step.first_s) for number, step in by_begin)
    return max(last_s, paths.busiest_s)


def _windowed(steps: Sequence[ExchangeStep], paths: _BusyPaths) -> float:
    """Run the exchanges with limited buffers: a holder comes to its next exchange when no more than
    its window allows are under way."""
    own: dict[StageId, deque[int]] = {}
    for number, step in enumerate(steps):
        for holder in step.holders:
            own.setdefault(holder, deque()).append(number)
    missing = [len(step.holders) for step in steps]
    begin_s = [step.first_s for step in steps]
    ends: dict[StageId, tuple[float, float]] = dict.fromkeys(own, (0.0, 0.0))
    last_taken = dict.fromkeys(own, 0)
    queue: list[tuple[float, int]] = []

    def come(holder: StageId) -> None:
        if own[holder]:
            number = own[holder].popleft()
            taken = last_taken[holder] + steps[number].buffers.get(holder, 0)
            # The last bucket but one has given its buffers back where two fit beside each other.
            place = 0 if taken <= BUFFERS_AT_ONCE else 1
            begin_s[number] = max(begin_s[number], ends[holder][place])
            missing[number] -= 1
            if not missing[number]:
                heappush(queue, (begin_s[number], number))

    for holder in own:
        come(holder)
    last_s = 0.0
    while queue:
        at_s, number = heappop(queue)
        step = steps[number]
        end_s = paths.take(number, step, at_s)
        last_s = max(last_s, end_s)
        is_one, before_s = step.num_buckets == 1, end_s - step.period_s
        for holder in step.holders:
            ends[holder] = ends[holder][1] if is_one else before_s, end_s
            last_taken[holder] = step.buffers.get(holder, 0)
            come(holder)
    return last_s
