"""New weights on their way: after the update, or while the first forward passes compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from megatron_hetero.schedule.parts import Collective, StageId
from megatron_hetero.schedule.simulator.exchange import Exchange, Paths


class Gathers:
    """The gathers of new weights.

    Messages of the first passes are small beside new weights that travel meanwhile, and share their
    paths: neither slows the other down here.

    Args:
        weights: in the order in which each stage starts them.
        from_s: the time from which each stage may start its own.
        lazily: each gather starts when the pass has come to what the gather before it brought, the
            first one with the pass, as stock Megatron does without interleaved stages
            (`DistributedDataParallel._make_forward_pre_hook`, core 0.19).
    """

    def __init__(
        self,
        weights: Sequence[Collective],
        from_s: Mapping[StageId, float],
        *,
        lazily: bool = False,
    ) -> None:
        self.spans: list[tuple[Collective, float, float]] = []
        """Gathers that have run, each with its begin and its end."""
        self.paths = Paths()
        self._weights, self._lazily = weights, lazily
        self._end_s: dict[int, float] = {}
        # What the first pass of each chunk needs, and how long after its begin.
        self._needed: defaultdict[tuple[StageId, int], list[tuple[int, float]]]
        self._needed = defaultdict(list)
        for number, gather in enumerate(weights):
            for holder, use in gather.needed.items():
                self._needed[holder, use.chunk].append((number, use.late_s))
        if not lazily:
            self._run_all(from_s)

    def begin_s(self, stage: StageId, chunk: int, now_s: float) -> float:
        """Return when a forward pass begins that could do so at `now_s`: late enough for each layer
        to find its weights; passes after the first one wait for none."""
        needed = self._needed.pop((stage, chunk), ())
        if self._lazily:
            return self._chained_s(needed, now_s)
        return max((now_s, *(self._end_s[number] - late_s for number, late_s in needed)))

    def _run_all(self, from_s: Mapping[StageId, float]) -> None:
        exchange = Exchange(self._weights, self.paths)
        queue: list[tuple[float, int, int]] = []
        # Equal times stay in the order in which they come up.
        place = count()

        def begin(found: Iterable[tuple[float, int]]) -> None:
            for at_s, number in found:
                heappush(queue, (at_s, next(place), number))

        for stage, at_s in from_s.items():
            begin(exchange.done(stage, at_s))
        while queue:
            at_s, _, number = heappop(queue)
            gather, start_s, end_s = exchange.run(number, at_s)
            self.spans.append((gather, start_s, end_s))
            self._end_s[number] = end_s
            begin(exchange.after(number))

    def _chained_s(self, needed: Iterable[tuple[int, float]], now_s: float) -> float:
        """Return the begin of a pass that starts each gather when it waits for the one before."""
        begin_s = start_s = now_s
        for number, late_s in needed:
            # The first holder runs it for all, which come to it at about the same time.
            gather = self._weights[number]
            longest_s = max((seconds for _, seconds in gather.hops), default=0.0)
            end_s = start_s + longest_s + gather.latency_s
            if number not in self._end_s:
                self._end_s[number] = end_s
                self.spans.append((gather, start_s, end_s))
                for path, seconds in gather.hops:
                    self.paths.busy_s[path] += seconds
            # The pass is as late as its latest bucket; the next gather starts with this one's use.
            begin_s = max(begin_s, end_s - late_s)
            start_s = begin_s + late_s
        return begin_s
