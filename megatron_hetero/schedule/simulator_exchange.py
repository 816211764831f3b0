"""Collectives of a simulated step: who comes to which when, and when each is done.

Every holder has its collectives in one order, which is the same for all of them, and goes through
them as its gradients become complete.  A collective begins with its last holder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_hetero.cost.exchange_clock import BUFFERS_AT_ONCE
from megatron_hetero.schedule.simulator_parts import Collective, StageId


class Paths:
    """Named paths that carry one thing at a time, first come first served."""

    def __init__(self) -> None:
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self._free_s: defaultdict[str, float] = defaultdict(float)

    def take(self, hops: Sequence[tuple[str, float]], now_s: float) -> tuple[float, float]:
        """Take paths, each for its seconds, once all are free; (start, end of the longest)."""
        # The engine's innermost loop: plain comparisons are faster than `max` of a generator.
        free_s, busy_s = self._free_s, self.busy_s
        start_s = now_s
        for path, _ in hops:
            if free_s[path] > start_s:
                start_s = free_s[path]
        last_s = start_s
        for path, seconds in hops:
            free_s[path] = end_s = start_s + seconds
            busy_s[path] += seconds
            if end_s > last_s:
                last_s = end_s
        return start_s, last_s

    def take_each(self, hops: Sequence[tuple[str, float]], now_s: float) -> tuple[float, float]:
        """Take paths, each for its seconds as soon as it is free; (first start, last end)."""
        spans = [self.take([hop], now_s) for hop in hops]
        if not spans:
            return now_s, now_s
        return min(start_s for start_s, _ in spans), max(end_s for _, end_s in spans)


@dataclass(slots=True)
class _Holder:
    """Where a stage has come to in its collectives."""

    numbers: list[int] = field(default_factory=list)
    num_come: int = 0
    came_s: float = 0.0
    done_s: float | None = None
    """When its programme was done."""
    final_s: dict[int, float] = field(default_factory=dict)
    """[chunk] -> when its last backward pass ends."""
    num_settled: int = 0
    settled_s: float = 0.0
    """By when so many of its first ones were done."""


class Exchange:
    """The collectives of one phase of the step."""

    def __init__(self, collectives: Sequence[Collective], paths: Paths) -> None:
        self._collectives, self._paths = collectives, paths
        self._present: defaultdict[int, list[float]] = defaultdict(list)
        self._end_s: dict[int, float] = {}
        self._holders: defaultdict[StageId, _Holder] = defaultdict(_Holder)
        for number, collective in enumerate(collectives):
            for holder in collective.holders:
                self._holders[holder].numbers.append(number)

    def final(self, stage: StageId, chunk: int, end_s: float) -> Iterator[tuple[float, int]]:
        """The last backward pass of a chunk ends at `end_s`.

        Yields:
            (time, number) of every collective that begins because of it.
        """
        self._holders[stage].final_s[chunk] = end_s
        yield from self._come(stage)

    def done(self, stage: StageId, at_s: float) -> Iterator[tuple[float, int]]:
        """A stage's programme is done; yields as `final`."""
        self._holders[stage].done_s = at_s
        yield from self._come(stage)

    def run(self, number: int, now_s: float) -> tuple[Collective, float, float]:
        """All holders are there; (collective, begin, end)."""
        collective = self._collectives[number]
        start_s, end_s = self._paths.take_each(collective.hops, now_s)
        end_s += collective.latency_s
        self._end_s[number] = end_s
        return collective, start_s, end_s

    def after(self, number: int) -> Iterator[tuple[float, int]]:
        """What begins because a collective's end is known; yields as `final`."""
        for holder in self._collectives[number].holders:
            yield from self._come(holder)

    def ends_s(self) -> Mapping[StageId, float]:
        """When each holder has all results."""
        return {
            stage: max(self._end_s[number] for number in holder.numbers)
            for stage, holder in self._holders.items()
            if holder.numbers
        }

    def _come(self, stage: StageId) -> Iterator[tuple[float, int]]:
        holder = self._holders[stage]
        while holder.num_come < len(holder.numbers):
            number = holder.numbers[holder.num_come]
            collective = self._collectives[number]
            at_s = self._ready_s(stage, holder, collective)
            if at_s is None:
                return
            holder.came_s = max(holder.came_s, at_s)
            holder.num_come += 1
            present = self._present[number]
            present.append(holder.came_s)
            if len(present) == len(collective.holders):
                yield max(present), number

    def _ready_s(self, stage: StageId, holder: _Holder, collective: Collective) -> float | None:
        final = collective.final.get(stage)
        if final is None:
            at_s = holder.done_s
        else:
            last_s = holder.final_s.get(final.chunk)
            at_s = None if last_s is None else last_s - final.early_s
        wanted = collective.buffers.get(stage, 0)
        if at_s is None or not wanted:
            return at_s
        while self._num_taken(stage, holder) > BUFFERS_AT_ONCE - wanted:
            end_s = self._end_s.get(holder.numbers[holder.num_settled])
            if end_s is None:
                return None
            holder.settled_s = max(holder.settled_s, end_s)
            holder.num_settled += 1
        return max(at_s, holder.settled_s)

    def _num_taken(self, stage: StageId, holder: _Holder) -> int:
        """Buffers of what it has come to and not seen done."""
        under_way = holder.numbers[holder.num_settled : holder.num_come]
        return sum(self._collectives[number].buffers.get(stage, 0) for number in under_way)
