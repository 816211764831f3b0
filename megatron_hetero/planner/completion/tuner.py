"""Layers and launch counts of one pipeline, changed step by step.

Each change is priced by the recurrence of 1F1B: when each pass of each stage can begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from megatron_hetero.cost.pipeline import least_pipeline_time_s, pipeline_time_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.planner.completion.counts import moved_counts
from megatron_hetero.planner.completion.filled import Filled, balanced
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.problem import Chain
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts

if TYPE_CHECKING:
    from megatron_hetero.planner.completion.completer import Completer
    from megatron_hetero.planner.completion.tables import Options, Tables

_STEPS = (1, 2, 4, 8, -1, -2)
"""Forwards by which a stage launches further ahead, or less far."""
_TAILS = (0, 1, 2, 4)
"""And by how many further than the rule, where it and all behind it follow the rule."""
_AHEAD = (1, 2, 4, 8, 16, 32)
"""Forwards by which all stages but the last launch further ahead, to begin with."""
_WORTH = 1 - 2e-4
"""A step must bring the pipeline's time below this part of it."""


class Tuner:
    """Layers and launch counts of one pipeline, each step priced by the recurrence."""

    def __init__(self, completer: Completer, tables: Tables, chain: Chain, number: int) -> None:
        self.completer, self.tables, self.chain = completer, tables, chain
        self.number = number
        costs = tables.costs
        self.forward = [costs.stage_hop(a.stage, b.stage) for a, b in pairwise(chain)]
        self.backward = [costs.stage_hop(b.stage, a.stage) for a, b in pairwise(chain)]
        self.own = tuple([min(len(chain) - i, number) for i in range(len(chain))])
        self.known: dict[object, tuple[float, tuple[StageOption, ...]] | None] = {}
        self._options: dict[tuple[int, ...], Options] = {}
        self.work = 0

    def options(self, counts: tuple[int, ...]) -> Options:
        """Return the options of every stage by layers, and their seconds, for launch counts."""
        found = self._options.get(counts)
        if found is None:
            found = self.completer.options(self.tables, self.chain, counts, counts != self.own)
            self._options[counts] = found
        return found

    def fitted(
        self, layers: tuple[int, ...], counts: tuple[int, ...], free: bool
    ) -> tuple[int, ...]:
        """Return the counts, fewer where the layers do not fit otherwise; if `free`, where they
        would recompute more."""
        if counts == self.own:
            return counts
        limits = None
        if free:
            plain = self.options(self.own)
            limits = [
                times[n - 1] if n <= len(times) else inf
                for n, (_, times) in zip(layers, plain, strict=True)
            ]
        while counts != self.own:
            options = self.options(counts)
            over = [
                i
                for i, (n, (_, times)) in enumerate(zip(layers, options, strict=True))
                if n > len(times) or (limits is not None and times[n - 1] > limits[i])
            ]
            if not over:
                break
            made = list(counts)
            for i in over:
                made[i] = self.own[i] + (made[i] - self.own[i]) // 2
            for i in range(1, len(made)):
                made[i] = min(made[i], made[i - 1])
            if tuple(made) == counts:
                return self.own
            counts = tuple(made)
        return counts

    def price(
        self, layers: tuple[int, ...], counts: tuple[int, ...], beat: float
    ) -> tuple[float, tuple[StageOption, ...]] | None:
        key = layers, counts
        if key in self.known:
            return self.known[key]
        options = self.options(counts)
        if any(n > len(of) for n, (of, _) in zip(layers, options, strict=True)):
            self.known[key] = None
            return None
        chosen = tuple([of[n - 1] for n, (of, _) in zip(layers, options, strict=True)])
        times = [PassTimes(option.forward_s, option.backward_s) for option in chosen]
        self.work += 16
        if least_pipeline_time_s(times, self.forward, self.backward, self.number) >= beat:
            return None
        self.work += len(layers) * self.number
        time_s = pipeline_time_s(times, self.forward, self.backward, self.number, counts)
        self.known[key] = time_s, chosen
        return self.known[key]

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
            return filled, inf
        time_s, chosen = first
        for start in list(self.starts(counts)):
            found = self.price(*start, time_s * _WORTH)
            if found is not None and found[0] < time_s * _WORTH:
                (time_s, chosen), (layers, counts) = found, start
        steps = self.steps(len(layers))
        place = since = 0
        while since < len(steps) and self.work < max_work:
            step = steps[place]
            place, since = (place + 1) % len(steps), since + 1
            for trial in self.moved(layers, counts, step, time_s * _WORTH):
                found = self.price(*trial, time_s * _WORTH)
                if found is not None and found[0] < time_s * _WORTH:
                    (time_s, chosen), (layers, counts), since = found, trial, 0
                    place = (place - 1) % len(steps)
                    break
        period_s = max([option.time_s for option in chosen])
        own = None if counts == self.own else counts
        fill_s = time_s - (self.number - 1) * period_s
        return Filled(layers, chosen, own, filled.size, fill_s, period_s), time_s

    def starts(self, counts: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield layers and launch counts to begin with: layers that suit depths, depths that
        suit the layers of 1F1B's own."""
        if not self.has_counts:
            return
        for further in self.further_ahead(counts):
            suited = self.filled(further)
            if suited is not None:
                yield suited, further
        plain = self.filled(self.own)
        if plain is not None:
            for further in (*self.rules(plain), *self.further_ahead(counts)):
                yield plain, self.fitted(plain, further, True)

    def further_ahead(self, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Let every stage but the last launch so many forwards more."""
        if self.tables.given or len(counts) == 1 or not self.completer.costs.has_launch_counts:
            return
        starts = dict.fromkeys((counts, self.own))
        for more in _AHEAD:
            if more >= self.number:
                break
            for start in starts:
                yield (*[min(count + more, self.number) for count in start[:-1]], start[-1])
        yield (*[self.number] * (len(counts) - 1), counts[-1])

    def filled(self, counts: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return layers for launch counts."""
        options = self.options(counts)
        trips_s = [a.total_s + b.total_s for a, b in zip(self.forward, self.backward, strict=True)]
        times_s = [times for _, times in options]
        return balanced(self.completer.problem.num_layers, times_s, trips_s, self.number)

    def steps(self, depth: int) -> list[tuple[int, int, bool | None]]:
        """Changes of launch counts, then of layers (giver, taker, None)."""
        found: list[tuple[int, int, bool | None]] = []
        if self.has_counts and depth > 1:
            for index in range(depth - 1):
                found += [(index, step, together) for step in _STEPS for together in (True, False)]
                found += [(index, -more - 1, None) for more in _TAILS]
        for giver in range(depth):
            found += [(giver, taker, None) for taker in range(depth) if taker != giver]
        return found

    @property
    def has_counts(self) -> bool:
        return not self.tables.given and self.completer.costs.has_launch_counts

    def moved(
        self,
        layers: tuple[int, ...],
        counts: tuple[int, ...],
        step: tuple[int, int, bool | None],
        beat: float,
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield layers and launch counts after a step, but for those that take as long as `beat`
        for the passes of one stage alone."""
        index, other, together = step
        if together is None and other < 0:
            for rule in self.rules(layers):
                first = min(rule[index] - other - 1, self.number)
                mixed = (*counts[:index], first, *rule[index + 1 :])
                if mixed != counts and (not index or counts[index - 1] >= first):
                    yield layers, mixed
            return
        if together is not None:
            moved = moved_counts(counts, index, other, self.number, together)
            if moved is not None:
                yield layers, moved
            return
        if layers[index] == 1 or not self._takes_one_more(layers, counts, other, beat):
            return
        changed = list(layers)
        changed[index] -= 1
        changed[other] += 1
        of = tuple(changed)
        variants = {self.fitted(of, counts, False): None}
        if self.has_counts and len(layers) > 1:
            variants[self.fitted(of, counts, True)] = None
            for rule in self.rules(of):
                variants[self.fitted(of, rule, True)] = None
        for variant in variants:
            yield of, variant

    def _takes_one_more(
        self, layers: tuple[int, ...], counts: tuple[int, ...], index: int, beat: float
    ) -> bool:
        """Return whether a stage may hold a layer more in less than `beat`: it recomputes least
        with the fewest micro-batches in flight."""
        _, times = self.options(tuple(map(min, self.own, counts)))[index]
        number = layers[index]
        return number < len(times) and self.number * times[number] < beat

    def rules(self, layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield launch counts that hide the hops, those that are short too."""
        plain = self.options(self.own)
        if any(n > len(times) for n, (_, times) in zip(layers, plain, strict=True)):
            return
        times_s = [times[n - 1] for n, (_, times) in zip(layers, plain, strict=True)]
        pairs = zip(self.forward, self.backward, strict=True)
        wanted = launch_counts(times_s, [(a.total_s + b.total_s) / 2 for a, b in pairs])
        counts = tuple([min(count, self.number) for count in wanted])
        yield counts
        yield (*[min(2 * count, self.number) for count in counts[:-1]], counts[-1])
