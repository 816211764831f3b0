"""Collectives of a simulated step: the ranks that come to each, and the time when each is done.

Every rank has its collectives in one order, which is the same for all of them, and goes through
them as its stage's gradients become complete.  A collective begins with its last rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_hetero.rounding import ROUNDING
from megatron_hetero.schedule.parts import Collective, StageId


class Paths:
    """Named paths; each carries a single message at a time, first come first served."""

    def __init__(self) -> None:
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self._free_s: defaultdict[str, float] = defaultdict(float)

    def take(self, hops: Sequence[tuple[str, float]], now_s: float) -> tuple[float, float]:
        """Take paths, each for its seconds, once all are free; return (start, end of the
        longest)."""
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
        """Take every path for its seconds as soon as the path is free; return (first start, last
        end)."""
        spans = [self.take([hop], now_s) for hop in hops]
        if not spans:
            return now_s, now_s
        return min(start_s for start_s, _ in spans), max(end_s for _, end_s in spans)


@dataclass(slots=True)
class _Rank:
    """The progress of a rank through its collectives."""

    numbers: list[int] = field(default_factory=list)
    num_come: int = 0
    came_s: float = 0.0
    done_s: float | None = None
    """Time at which the rank's programme was done."""
    final_s: dict[int, float] = field(default_factory=dict)
    """[chunk] -> the end of its last backward pass."""
    num_settled: int = 0
    settled_s: float = 0.0
    """Time by which `num_settled` of the rank's first collectives were done."""


class Exchange:
    """The collectives of one phase of the step."""

    def __init__(self, collectives: Sequence[Collective], paths: Paths) -> None:
        self._collectives, self._paths = collectives, paths
        # By collective: times of the ranks that have come, then its end.
        self._present: defaultdict[int, list[float]] = defaultdict(list)
        self._end_s: dict[int, float] = {}
        self._ranks: defaultdict[StageId, defaultdict[int, _Rank]]
        self._ranks = defaultdict(lambda: defaultdict(_Rank))
        # Each rank has its collectives in the order of the list.
        for number, collective in enumerate(collectives):
            for stage, place in collective.ranks:
                self._ranks[stage][place].numbers.append(number)

    def final(self, stage: StageId, chunk: int, end_s: float) -> list[tuple[float, int]]:
        """Record that the last backward pass of a chunk ends at `end_s`.

        Returns:
            (time, number) of every collective that begins because of it, in order: its ranks come
            to their first ones side by side, then to their second ones.
        """
        # All ranks of a stage run the same programme.
        for rank in self._ranks[stage].values():
            rank.final_s[chunk] = end_s
        return self._come_all(stage)

    def done(self, stage: StageId, at_s: float) -> list[tuple[float, int]]:
        """Record that a stage's programme is done; return as `final`."""
        for rank in self._ranks[stage].values():
            rank.done_s = at_s
        return self._come_all(stage)

    def _come_all(self, stage: StageId) -> list[tuple[float, int]]:
        return sorted(begun for r in self._ranks[stage].values() for begun in self._come(stage, r))

    def run(self, number: int, now_s: float) -> tuple[Collective, float, float]:
        """Run a collective whose ranks are all there; return (collective, begin, end)."""
        collective = self._collectives[number]
        start_s, end_s = self._paths.take_each(collective.hops, now_s)
        end_s += collective.latency_s
        self._end_s[number] = end_s
        return collective, start_s, end_s

    def after(self, number: int) -> Iterator[tuple[float, int]]:
        """Yield what begins because a collective's end is known, as in `final`."""
        for stage, place in self._collectives[number].ranks:
            yield from self._come(stage, self._ranks[stage][place])

    def ends_s(self) -> Mapping[StageId, float]:
        """Return when each stage has all results."""
        return {
            stage: max(self._end_s[n] for rank in ranks.values() for n in rank.numbers)
            for stage, ranks in self._ranks.items()
            if ranks
        }

    def _come(self, stage: StageId, rank: _Rank) -> Iterator[tuple[float, int]]:
        while rank.num_come < len(rank.numbers):
            # Ranks come in order: one that is not ready yet holds up those behind it.
            number = rank.numbers[rank.num_come]
            collective = self._collectives[number]
            at_s = self._ready_s(stage, rank, collective)
            if at_s is None:
                return
            rank.came_s = max(rank.came_s, at_s)
            rank.num_come += 1
            present = self._present[number]
            present.append(rank.came_s)
            # The last rank begins the collective for all.
            if len(present) == len(collective.ranks):
                yield max(present), number

    def _ready_s(self, stage: StageId, rank: _Rank, collective: Collective) -> float | None:
        # When its gradients are complete: with the programme, or some time before a chunk's last
        # pass ends.
        final = collective.final.get(stage)
        if final is None:
            at_s = rank.done_s
        else:
            last_s = rank.final_s.get(final.chunk, rank.done_s)
            at_s = None if last_s is None else last_s - final.early_s
        # Then when there is room for its buffers.
        wanted = collective.buffers.get(stage, 0.0)
        if at_s is None or not wanted:
            return at_s
        left = 1 - wanted + ROUNDING
        # What takes all the room waits for those before it that need none, too.
        while self._taken(stage, rank) > left or (wanted >= 1 and rank.num_settled < rank.num_come):
            # The oldest one under way has to end first; its end may not be known yet.
            end_s = self._end_s.get(rank.numbers[rank.num_settled])
            if end_s is None:
                return None
            rank.settled_s = max(rank.settled_s, end_s)
            rank.num_settled += 1
        return max(at_s, rank.settled_s)

    def _taken(self, stage: StageId, rank: _Rank) -> float:
        """Sum the buffers of collectives under way on a rank, from the rank's coming until the end.
        """
        under_way = rank.numbers[rank.num_settled : rank.num_come]
        return sum(self._collectives[number].buffers.get(stage, 0.0) for number in under_way)
