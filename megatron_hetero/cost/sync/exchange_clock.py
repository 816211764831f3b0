"""End times of exchanges that share paths, each priced whole: the simulator's quick form."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from heapq import heappop, heappush
from math import ceil, inf

import numpy as np

from megatron_hetero.cost.network.holder_flow import Flow
from megatron_hetero.cost.sync.buckets import StageId
from megatron_hetero.hashed import value
from megatron_hetero.kernels import KERNELS
from megatron_hetero.rounding import ROUNDING


def num_buckets(bucket_share: float) -> int:
    """Count the buckets of an exchange whose buckets but the last are `bucket_share` of it."""
    return max(1, ceil(1 / bucket_share - ROUNDING))


@value(frozen=True, eq=False)
class ExchangeStep:
    """One exchange, bucket by bucket; all but the last are `bucket_share` of it.

    Its first bucket is complete at `first_s`, its last one at `last_s`.  `holders`: of those that
    come to all their exchanges together one is enough.  `buffers`: the part of a holder's room
    (`cost.sync.room`) that one bucket takes; more than 1 goes in turns; empty where it needs none.
    `due_s`: when its result is needed, from which its end counts.
    """

    holders: tuple[StageId, ...]
    flow: Flow
    first_s: float
    last_s: float
    bucket_share: float = 1.0
    buffers: Mapping[StageId, float] = field(default_factory=dict)
    due_s: float = 0.0

    @cached_property
    def window(self) -> float:
        """Return how many of its buckets find room at a time; less than 1 goes in turns."""
        part = max(self.buffers.values(), default=0.0)
        return _whole(1 / part) if part else inf

    @property
    def latency_s(self) -> float:
        """Return the latency of a bucket: once in each of its turns."""
        return self.flow.latency_s * max(1.0, 1 / self.window)

    def paced_s(self, bucket_s: float) -> float:
        """Return the seconds from one bucket of `bucket_s` to the next: a full window waits for the
        latency of its buckets where their bytes do not cover it."""
        return max(
            bucket_s, min(bucket_s, bucket_s / self.window) + self.flow.latency_s / self.window
        )

    @cached_property
    def num_buckets(self) -> int:
        """Count the buckets of the whole exchange."""
        return num_buckets(self.bucket_share)

    @cached_property
    def longest_s(self) -> float:
        """Return the seconds of its busiest path."""
        return float(self.flow.seconds.max(initial=0.0))

    @cached_property
    def last_bucket_s(self) -> float:
        """Return the seconds of the last bucket on the step's busiest path."""
        return self.longest_s * (1 - (self.num_buckets - 1) * self.bucket_share)

    @cached_property
    def period_s(self) -> float:
        """Return the seconds between the ends of the last two buckets."""
        return self.paced_s(self.last_bucket_s)


class _BusyPaths:
    """Times at which each path of some exchanges is free again.

    Args:
        carried: seconds, by path, for which something else takes it before the last of them is
            done.
    """

    def __init__(self, steps: Sequence[ExchangeStep], carried: Mapping[int, float]) -> None:
        # `own`: places in `paths` of all flows, one step after the other.
        paths, own = np.unique(np.concatenate([s.flow.paths for s in steps]), return_inverse=True)
        self._free_s = np.zeros(len(paths))
        taken_s = np.concatenate([step.flow.seconds for step in steps])
        busy_s = np.bincount(own, taken_s, len(paths))
        # What boundaries carry counts only on the paths that an exchange takes.
        if carried and len(paths):
            numbers = np.array(sorted(carried))
            places = np.searchsorted(paths, numbers)
            places[places == len(paths)] = 0
            known = paths[places] == numbers
            seconds = np.array([carried[number] for number in numbers.tolist()])
            busy_s[places[known]] += seconds[known]
        due_s = max(step.due_s for step in steps)
        self.busiest_s = float(busy_s.max(initial=0.0)) - due_s
        """Seconds for which the busiest path is taken in all, from when the last exchange is due:
        no end comes before."""
        # `own` split again, [step] -> places of its paths.
        ends = np.cumsum([len(step.flow.paths) for step in steps])[:-1]
        self._own = np.split(own, ends)

    def take(self, number: int, step: ExchangeStep, begin_s: float) -> float:
        """Take all paths of a step, each as soon as it is free; return the exchange's end.

        Args:
            number: the step's place among all.
        """
        # Each path is taken from when it is free; the exchange ends with the last of them.
        own = self._own[number]
        ends_s = np.maximum(self._free_s[own], begin_s) + step.flow.seconds
        self._free_s[own] = ends_s
        end_s = float(ends_s.max(initial=begin_s))
        # Buckets beyond the window wait for those before them: the pace exceeds their bytes.
        bucket_s = step.longest_s * step.bucket_share
        num_waiting = max(0.0, step.num_buckets - max(1.0, step.window))
        end_s += num_waiting * (step.paced_s(bucket_s) - bucket_s)
        # The last bucket cannot start before it is complete.
        return max(end_s, step.last_s + step.last_bucket_s) + step.latency_s


def last_end_s(steps: Sequence[ExchangeStep], carried: Mapping[int, float] | None = None) -> float:
    """Compute when the last exchange is done, seconds from when each is due; 0 where there are
    none.

    Args:
        steps: in the order in which each holder comes to its own.
        carried: seconds, by path, for which it carries something else since time 0.
    """
    if not steps:
        return 0.0
    # With room for all buckets, exchanges take their paths in the order in which they are ready.
    lack_room = _lack_room(steps)
    by_begin = sorted(enumerate(steps), key=lambda entry: entry[1].first_s)
    # The compiled loop does the same operations in the same order.
    if KERNELS is not None:
        flows = [
            (
                *(s.flow.paths, s.flow.seconds, s.flow.latency_s, s.first_s, s.last_s),
                *(s.bucket_share, s.num_buckets, s.window, s.due_s),
            )
            for s in steps
        ]
        order, loads = [number for number, _ in by_begin], carried or {}
        holders = _numbered(steps) if lack_room else []
        given = flows, order, list(loads), list(loads.values()), holders, ROUNDING
        return KERNELS.latest_end(*given)
    paths = _BusyPaths(steps, carried or {})
    if lack_room:
        last_s = _windowed(steps, paths)
    else:
        last_s = max(
            paths.take(number, step, step.first_s) - step.due_s for number, step in by_begin
        )
    return max(last_s, paths.busiest_s)


def _numbered(steps: Sequence[ExchangeStep]) -> list[tuple[list[int], list[float]]]:
    """Return the numbers of each step's holders, as they first come, and the parts of their
    rooms."""
    numbers: dict[StageId, int] = {}
    return [
        (
            [numbers.setdefault(holder, len(numbers)) for holder in step.holders],
            [step.buffers.get(holder, 0.0) for holder in step.holders],
        )
        for step in steps
    ]


def _lack_room(steps: Sequence[ExchangeStep]) -> bool:
    """Tell if a holder has no room for all of its buckets at a time."""
    # Parts of the room of each holder, were all buckets of a step under way.
    taken: dict[StageId, float] = {}
    for step in steps:
        for holder, part in step.buffers.items():
            taken[holder] = taken.get(holder, 0.0) + step.num_buckets * part
    return max(taken.values(), default=0.0) > 1 + ROUNDING


class _HolderRoom:
    """The room of one holder: what is under way, in the order in which it ends."""

    def __init__(self) -> None:
        self._taken = 0.0
        self._under_way: deque[tuple[float, float]] = deque()

    def found_s(self, part: float) -> float:
        """Return when there is room for a bucket: the end of as many others as stand in its way."""
        end_s = 0.0
        # Buckets leave in the order of their ends until the new one fits.
        while part and self._under_way and self._taken + part > 1 + ROUNDING:
            ended_s, freed = self._under_way.popleft()
            self._taken -= freed
            end_s = max(end_s, ended_s)
        return end_s

    def take(self, step: ExchangeStep, part: float, end_s: float) -> None:
        """Take the path for the buckets under way at `end_s`, the end of an exchange, or just
        before."""
        # Only the buckets that the window holds at the end are still under way.
        num = min(step.num_buckets, max(1, int(_whole(1 / part))))
        self._under_way += [
            (end_s - n * step.period_s, min(part, 1.0)) for n in reversed(range(num))
        ]
        self._taken += num * min(part, 1.0)


def _windowed(steps: Sequence[ExchangeStep], paths: _BusyPaths) -> float:
    """Run the exchanges in limited room: a holder comes to its next exchange when it has room for
    one of its buckets."""
    # Exchanges of each holder in order; an exchange begins when its last holder has come.
    own: dict[StageId, deque[int]] = {}
    for number, step in enumerate(steps):
        for holder in step.holders:
            own.setdefault(holder, deque()).append(number)
    missing = [len(step.holders) for step in steps]
    begin_s = [step.first_s for step in steps]
    rooms = {holder: _HolderRoom() for holder in own}
    queue: list[tuple[float, int]] = []

    def come(holder: StageId) -> None:
        # The exchange waits for the latest of its holders to find room.
        if own[holder]:
            number = own[holder].popleft()
            found_s = rooms[holder].found_s(steps[number].buffers.get(holder, 0.0))
            begin_s[number] = max(begin_s[number], found_s)
            missing[number] -= 1
            if not missing[number]:
                heappush(queue, (begin_s[number], number))

    # All holders come to their first exchange.
    for holder in own:
        come(holder)
    last_s = 0.0
    # The earliest exchange takes its paths, then lets its holders go on.
    while queue:
        at_s, number = heappop(queue)
        step = steps[number]
        end_s = paths.take(number, step, at_s)
        last_s = max(last_s, end_s - step.due_s)
        for holder in step.holders:
            if holder in step.buffers:
                rooms[holder].take(step, step.buffers[holder], end_s)
            come(holder)
    return last_s


def _whole(ratio: float) -> float:
    """Round down to a whole number from 1 on."""
    return ratio if ratio < 1 else float(int(ratio + ROUNDING))
