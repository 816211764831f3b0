"""Layers and launch counts of one pipeline, changed step by step.

Each change is priced by the recurrence of 1F1B: when each pass of each stage can begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, permutations
from math import inf

from megatron_hetero.cost.pipeline import ends_s, in_rows
from megatron_hetero.planner.completion.filled import Filled, balanced, least_time_s
from megatron_hetero.planner.completion.pipelines import PipelineCompleter
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.tables import Options, Tables
from megatron_hetero.planner.division.counts import other_counts
from megatron_hetero.planner.units import Chain

_WORTH = 1 - 2e-4
"""A step must bring the pipeline's time below this part of it."""
_RESTARTS = 4
"""Divisor of the work: further starts are climbed from until this part of the work is done."""
_BOUND_WORK = 16
"""Operations of the recurrence that take as long as to bound a time, or to divide layers."""

Setting = tuple[tuple[int, ...], tuple[int, ...]]
"""Layers and launch counts of all stages."""
Priced = tuple[float, tuple[StageOption, ...]]
"""Seconds of a pipeline, and its stages."""
Tuned = tuple[float, tuple[int, ...], tuple[int, ...], tuple[StageOption, ...]]
"""Seconds, layers, launch counts and stages."""
Step = Callable[[tuple[int, ...], tuple[int, ...]], Iterator[Setting]]
"""Settings to try instead of one."""


class Tuner:
    """Layers and launch counts of one pipeline, each step priced by the recurrence."""

    def __init__(
        self, completer: PipelineCompleter, tables: Tables, chain: Chain, number: int
    ) -> None:
        self.completer, self.tables, self.chain = completer, tables, chain
        self.number = number
        self.has_counts = not tables.given and len(chain) > 1 and completer.costs.has_launch_counts
        costs = tables.costs
        self.forward = in_rows([costs.stage_hop(a.stage, b.stage) for a, b in pairwise(chain)])
        self.backward = in_rows([costs.stage_hop(b.stage, a.stage) for a, b in pairwise(chain)])
        self.trips_s, _ = completer.trips(tables, chain)
        self.own = tuple([min(len(chain) - i, number) for i in range(len(chain))])
        self._options: dict[tuple[int, ...], Options] = {}
        self._suited: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self.tried: set[Setting] = set()
        self.work = 0

    def options(self, counts: tuple[int, ...]) -> Options:
        """Return the options of every stage by layers, and their seconds, for launch counts."""
        found = self._options.get(counts)
        if found is None:
            found = self.completer.options(self.tables, self.chain, counts, counts != self.own)
            self._options[counts] = found
        return found

    def price(self, layers: tuple[int, ...], counts: tuple[int, ...], beat: float) -> Priced | None:
        """Return the pipeline's seconds and its stages; None where they do not fit, or cannot take
        less than `beat`."""
        options = self.options(counts)
        pairs = list(zip(layers, options, strict=True))
        for n, (of, _) in pairs:
            # Some stage has no room for its layers.
            if n > len(of):
                return None
        self.work += _BOUND_WORK
        times_s = [of[n - 1] for n, (_, of) in pairs]
        # The quick bound spares the recurrence most of the time.
        if least_time_s(times_s, self.trips_s, self.number) >= beat:
            return None
        self.work += len(layers) * self.number
        chosen = tuple([of[n - 1] for n, (of, _) in pairs])
        forward_s = [option.forward_s for option in chosen]
        backward_s = [option.backward_s for option in chosen]
        found = ends_s(forward_s, backward_s, self.forward, self.backward, self.number, counts)
        return max(found), chosen

    def run(self, filled: Filled, max_work: int) -> tuple[Filled, float]:
        """Return the pipeline tuned from `filled` on, and its seconds.

        Args:
            max_work: limit in operations of the recurrence (stages times micro-batches).
        """
        layers, counts = filled.layers, self.own
        if filled.counts is not None:
            counts = tuple([min(c, self.number) for c in filled.counts])
        first = self.price(layers, counts, inf)
        if first is None:
            # Without a start there is nothing to tune.
            return filled, inf
        best = self.climb(layers, counts, first, max_work)
        # Further starts: other launch counts, from which a climb may end elsewhere.
        starts = self.launched(layers, counts, singles=False) if self.has_counts else ()
        for start in dict.fromkeys(starts):
            if self.work >= max_work // _RESTARTS:
                break
            first = self.price(*start, inf)
            if first is not None:
                best = min(best, self.climb(*start, first, max_work), key=_time_s)
        time_s, layers, counts, chosen = best
        period_s = max([option.time_s for option in chosen])
        own = None if counts == self.own else counts
        # The straight line through the tuned time, with the slowest stage's period.
        fill_s = time_s - (self.number - 1) * period_s
        return Filled(layers, chosen, own, filled.size, fill_s, period_s), time_s

    def climb(
        self, layers: tuple[int, ...], counts: tuple[int, ...], first: Priced, max_work: int
    ) -> Tuned:
        """Go on from a setting to faster ones as long as there are any.

        Args:
            first: its price.
            max_work: as of `run`.
        """
        time_s, chosen = first
        self.tried.add((layers, counts))
        steps = self.steps()
        # `since` counts the kinds of steps since the last gain; after all of them the climb ends.
        place = since = 0
        while since < len(steps) and self.work < max_work:
            for trial in steps[place](layers, counts):
                if trial in self.tried:
                    continue
                if self.work >= max_work:
                    break
                self.tried.add(trial)
                # Only what gains enough to be worth a step.
                found = self.price(*trial, time_s * _WORTH)
                if found is not None and found[0] < time_s * _WORTH:
                    (time_s, chosen), (layers, counts), since = found, trial, 0
                    break
            else:
                place, since = (place + 1) % len(steps), since + 1
        return time_s, layers, counts, chosen

    def steps(self) -> list[Step]:
        """Return all that is tried: other launch counts, then layers moved."""
        pairs = permutations(range(len(self.chain)), 2)
        first = self.launched if self.has_counts else self.suited
        return [first, *[partial(self.moved, *pair) for pair in pairs]]

    def launched(
        self, layers: tuple[int, ...], counts: tuple[int, ...], singles: bool = True
    ) -> Iterator[Setting]:
        """Yield new launch counts, each with the layers unchanged and with new layers.

        Args:
            singles: also counts in which one stage's are changed, as of `other_counts`.
        """
        options = zip(layers, self.options(counts), strict=True)
        times_s = [times[n - 1] for n, (_, times) in options]
        for other in other_counts(counts, self.number, times_s, self.trips_s, singles):
            yield from self.suited(layers, other)

    def suited(self, layers: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Setting]:
        """Yield the counts with the layers unchanged, and with layers that suit the counts."""
        yield layers, counts
        if counts not in self._suited:
            times_s = [times for _, times in self.options(counts)]
            num_layers = self.completer.problem.num_layers
            self.work += _BOUND_WORK
            self._suited[counts] = balanced(num_layers, times_s, self.trips_s, self.number)
        suited = self._suited[counts]
        if suited is not None:
            yield suited, counts

    def moved(
        self, giver: int, taker: int, layers: tuple[int, ...], counts: tuple[int, ...]
    ) -> Iterator[Setting]:
        """Yield the layers with one of a stage given to another."""
        if layers[giver] > 1:
            changed = list(layers)
            changed[giver] -= 1
            changed[taker] += 1
            yield tuple(changed), counts


def _time_s(tuned: Tuned) -> float:
    return tuned[0]
