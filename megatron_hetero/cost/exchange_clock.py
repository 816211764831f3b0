"""When exchanges that share paths are done, each priced whole: the simulator's quick form."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from megatron_hetero.cost.buckets import StageId
from megatron_hetero.cost.placement import PlacedStage

Path = tuple[object, object]
"""(node, node), or (the first device of a group, or the group's place in a ring, "in" or "out") for
its port in its node."""


BUFFERS_AT_ONCE = 2
"""Buckets of a rank under way at a time that need buffers of their own (`runtime.gradients`)."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Flow:
    """Seconds (of a byte, or of a whole buffer) for which each path is taken, and latency."""

    paths: tuple[tuple[Path, float], ...]
    latency_s: float

    def of(self, groups: Sequence[PlacedStage], num_bytes: float) -> Flow:
        """A buffer's, from a byte's; ports named by places are those of `groups`."""
        paths = []
        for path, seconds in self.paths:
            place, way = path
            own = (groups[place].devices[0], way) if isinstance(place, int) else path
            paths.append((own, seconds * num_bytes))
        return Flow(tuple(paths), self.latency_s)


@dataclass(frozen=True)
class Step:
    """One exchange, bucket by bucket; all but the last are `bucket_share` of it.

    Its first bucket is complete at `first_s`, its last one at `last_s`.  `buffers`:
    those of a holder's `BUFFERS_AT_ONCE` that one bucket takes; empty where it needs none.
    """

    holders: tuple[StageId, ...]
    flow: Flow
    first_s: float
    last_s: float
    bucket_share: float = 1.0
    buffers: Mapping[StageId, int] = field(default_factory=dict)

    @property
    def window(self) -> int:
        """So many of its buckets are under way at a time."""
        return BUFFERS_AT_ONCE // max(self.buffers.values(), default=1)

    @property
    def num_buckets(self) -> int:
        """Of the whole exchange."""
        return max(1, ceil(1 / self.bucket_share - _ROUNDING))

    @property
    def longest_s(self) -> float:
        """Seconds of its busiest path."""
        return max((seconds for _, seconds in self.flow.paths), default=0.0)

    @property
    def last_bucket_s(self) -> float:
        """Seconds of its last bucket on its busiest path."""
        return self.longest_s * (1 - (self.num_buckets - 1) * self.bucket_share)

    @property
    def period_s(self) -> float:
        """From the end of the last bucket but one to that of the last."""
        return max(self.last_bucket_s, (self.last_bucket_s + self.flow.latency_s) / self.window)


def last_end_s(steps: Sequence[Step]) -> float:
    """When the last of them is done; 0 where there are none.

    Args:
        steps: in the order in which each holder comes to its own.
    """
    paths: defaultdict[Path, float] = defaultdict(float)
    if not any(step.buffers for step in steps):
        return max((_take(s, s.first_s, paths) for s in _by_begin(steps)), default=0.0)
    return _windowed(steps, paths)


def _by_begin(steps: Sequence[Step]) -> list[Step]:
    return sorted(steps, key=lambda step: step.first_s)


def _take(step: Step, begin_s: float, free_s: defaultdict[Path, float]) -> float:
    """Take all paths, each as soon as it is free; the exchange's end."""
    end_s = begin_s
    for path, seconds in step.flow.paths:
        path_end_s = max(begin_s, free_s[path]) + seconds
        free_s[path] = path_end_s
        end_s = max(end_s, path_end_s)
    latency_s = step.flow.latency_s
    if step.buffers and step.num_buckets > 1:
        # A full window waits for the latency of its buckets where their bytes do not cover it.
        bucket_s = step.longest_s * step.bucket_share
        wait_s = (bucket_s + latency_s) / step.window - bucket_s
        end_s += (step.num_buckets - 1) * max(0.0, wait_s)
    return max(end_s, step.last_s + step.last_bucket_s) + latency_s


def _windowed(steps: Sequence[Step], free_s: defaultdict[Path, float]) -> float:
    """A holder comes to its next exchange when no more than its window allows are under way."""
    own: defaultdict[StageId, deque[int]] = defaultdict(deque)
    for number, step in enumerate(steps):
        for holder in step.holders:
            own[holder].append(number)
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
        end_s = _take(step, at_s, free_s)
        last_s = max(last_s, end_s)
        for holder in step.holders:
            before_s = end_s - step.period_s if step.num_buckets > 1 else ends[holder][1]
            ends[holder] = before_s, end_s
            last_taken[holder] = step.buffers.get(holder, 0)
            come(holder)
    return last_s
