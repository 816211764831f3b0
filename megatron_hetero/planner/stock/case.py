"""One way to set stock Megatron's flags but for the layers: what each division of them takes.

A case is a grid of ranks, a micro-batch size, a kind of recompute and a number of model chunks on a
stage.  Of recompute by blocks (`--recompute-method block`) each division takes as few layers as
fit, because more only take longer; none and all are the ends of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.case_pace import CasePace
from megatron_hetero.planner.stock.chunk_seconds import chunk_flops, chunk_seconds
from megatron_hetero.planner.stock.divisions import Divisions, even_chunks
from megatron_hetero.planner.stock.exchange import ExchangeLines, exchange_lines
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.planner.stock.in_flight import kept_chunks, stock_schedule
from megatron_hetero.planner.stock.place import NEVER, StockPlace
from megatron_hetero.planner.stock.prices import StockPrices
from megatron_hetero.planner.stock.settings import StockSettings
from megatron_hetero.schedule.parts import SendMode
from megatron_hetero.schedule.simulator.relaxed import BoundarySeconds, RelaxedRun, Seconds


class StockCase:
    """Prices every division of the layers of one case.

    Args:
        problem: whose job is divided.
        grid: of ranks.
        settings: the other flags.
        prices: of stages, for all cases of a search.
    """

    def __init__(
        self,
        problem: Problem,
        grid: StockGrid,
        settings: StockSettings,
        prices: StockPrices | None = None,
    ) -> None:
        self.problem, self.grid, self.settings = problem, grid, settings
        self._prices = (prices or StockPrices(problem)).of(grid, settings)
        self._waits = problem.workload.training.stock_waits
        self.num_micro_batches = self._prices.num_micro_batches
        self._pace = CasePace(self._prices, self.sends)

    @cached_property
    def _places(self) -> list[dict[int, StockPlace]]:
        """Times and memory of each stage, by its place in `GridPrices.stages`."""
        numbers = self._prices.stages.numbers
        return [
            {own: self._prices.place(numbers[own], p) for own in set(places)}
            for p, places in enumerate(self._prices.stages.places.T.tolist())
        ]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.problem.num_layers

    @property
    def num_chunks(self) -> int:
        """Chunks of each stage."""
        return self.settings.num_chunks

    def chunks_of_stages(self) -> list[NDArray[np.int64]]:
        """Return ways to cut each number of layers on each stage into chunks, shape [stage, layers,
        chunk]: larger chunks first, and larger chunks last; on the last stage with room for the
        head, and without.  Where a stage holds one of both alone, that one."""
        layer_flops, head_flops = chunk_flops(self.problem.workload)
        num_layers, num_chunks, last = self.num_layers, self.num_chunks, self.grid.num_stages - 1
        plain = even_chunks(num_layers, num_chunks, 0.0)
        with_head = even_chunks(num_layers, num_chunks, head_flops / layer_flops)
        first = np.stack([with_head if p == last else plain for p in self._stages])
        if num_chunks == 1:
            return [first]
        other = np.stack([plain if p == last else plain[:, ::-1] for p in self._stages])
        # Four combinations: both ways of the last stage with both of the others.
        fits = [self._holds(p, own[p]) for own in (first, other) for p in self._stages]
        fits_first, fits_other = np.array(fits).reshape(2, *first.shape[:2])[..., None]
        ways = [
            np.where(fits_first | ~fits_other, first, other),
            np.where(fits_other | ~fits_first, other, first),
        ]
        return [np.concatenate([one[:-1], end[-1:]]) for one in ways for end in ways]

    def quick_s(self, most_chunks: int | None = None) -> float:
        """Return what no division falls below (`CasePace.quick_s`)."""
        return self._pace.quick_s(most_chunks or self.num_chunks)

    def pace_s(self) -> float:
        """Return the work of all stages (`CasePace.pace_s`)."""
        return self._pace.pace_s(self.num_chunks)

    def least_s(self) -> float:
        """Return what no division falls below in whole layers that fit, with the recompute that
        fitting takes; infinite where none fits."""
        # Most of what does not fit is found without any seconds.
        if not self._has_all(self._kept < NEVER):
            return float("inf")
        # The least time by which the stages have as many layers as the model: each time of a stage
        # with some layers may be that.
        times_s = np.unique(self._ends_s[np.isfinite(self._ends_s)])
        low, high = 0, len(times_s)
        while low < high:
            middle = (low + high) // 2
            if self._has_all(self._ends_s <= times_s[middle]):
                high = middle
            else:
                low = middle + 1
        return float(times_s[low]) if low < len(times_s) else float("inf")

    def _has_all(self, may: NDArray[np.bool_]) -> bool:
        """Return whether the stages hold all layers, and one in each chunk.

        Args:
            may: whether a stage may have so many, [stage, layers].
        """
        most = np.max(np.where(may, np.arange(self.num_layers + 1), 0), axis=1)
        return bool(most.min() >= self.num_chunks and most.sum() >= self.num_layers)

    def stage_layers(self, below_s: float) -> list[list[int]]:
        """Return the possible numbers of layers of each stage: within memory and with an end before
        `below_s`."""
        chunks = self.num_chunks
        # Every other stage keeps one layer in each chunk.
        most = self.num_layers - chunks * (self.grid.num_stages - 1)
        may = self._ends_s < below_s
        return [(np.flatnonzero(own[chunks : most + 1]) + chunks).tolist() for own in may]

    @cached_property
    def _ends_s(self) -> NDArray[np.float64]:
        """Passes of the slowest replica with the least recompute, what comes before and after them
        at least, and the update, [stage, layers]; infinite where the stage does not fit."""
        again = np.where(self._kept < NEVER, self._kept, 0)
        layers = np.arange(self.num_layers + 1)
        found = np.full(again.shape, np.inf)
        waits_s, fills_s = (own.T[..., None] for own in self._pace.least_fills_s())
        num_hiding = self._pace.num_hiding(self.num_chunks)
        for p, (zero_s, more_s) in zip(self._stages, self._pace.least_exchange, strict=True):
            exchange_s = zero_s + more_s * layers
            totals_s, updates_s = {}, {}
            for number, place in self._places[p].items():
                totals_s[number] = place.totals_s(again[p])
                update_s, layer_update_s = place.memories.update_s
                updates_s[number] = update_s + layer_update_s * layers
            own = self._prices.stages.places[:, p].tolist()
            # After the passes its own exchange, or the way back through the stages before.
            each_s = np.array([totals_s[n] for n in own]) + waits_s[p]
            left_s = np.maximum(exchange_s - num_hiding[p] * each_s, fills_s[p])
            ends_s = self.num_micro_batches * each_s
            ends_s += np.array([updates_s[n] for n in own]) + left_s
            found[p] = np.where(self._kept[p] < NEVER, ends_s.max(axis=0), np.inf)
        return found

    @cached_property
    def _kept(self) -> NDArray[np.int64]:
        """What the fullest replica has to recompute, [stage, layers]."""
        return np.array(
            [
                np.max([place.memories.least_recomputed for place in places.values()], axis=0)
                for places in self._places
            ]
        )

    @property
    def _stages(self) -> range:
        return range(self.grid.num_stages)

    def layers_to_recompute(self, stages: Divisions) -> Divisions:
        """Return it by blocks, for divisions of the stages, shape [division]."""
        # Stock Megatron has one number for all stages: the largest that any stage needs.
        kept = [self._kept[p][stages[:, p]] for p in self._stages]
        return np.asarray(np.max(kept, axis=0), dtype=np.int64)

    def least_times_s(self, divisions: Divisions, is_quick: bool = False) -> Seconds:
        """Return a step of each division in seconds, paths that are shared left out; `inf` where
        it does not fit.

        Args:
            is_quick: with the least exchange of gradients and new weights, not with their own.
        """
        stages = self.stages_of(divisions)
        recomputed = self.layers_to_recompute(stages)
        fits = recomputed < NEVER
        if self.num_chunks > 1:
            fits &= self._holds_chunks(divisions)
        found = np.full(len(divisions), np.inf)
        if fits.any():
            own = divisions[fits], stages[fits], recomputed[fits]
            found[fits] = self._times_s(*own, is_quick)
        return found

    def _times_s(
        self, divisions: Divisions, stages: Divisions, recomputed: Divisions, is_quick: bool
    ) -> Seconds:
        # Pricing many divisions at once: each pass is an array over divisions.
        run = _relaxed_run(
            self.grid.num_stages, self.num_chunks, self.num_micro_batches, self.sends
        )
        chunks_s = [
            {
                number: chunk_seconds(
                    self.problem.workload,
                    place,
                    divisions[:, p :: self.grid.num_stages],
                    np.minimum(recomputed, stages[:, p]),
                    is_last=p + 1 == self.grid.num_stages,
                )
                for number, place in places.items()
            }
            for p, places in enumerate(self._places)
        ]
        begins: list[NDArray[np.float64]] = []
        ends: list[NDArray[np.float64]] = []
        overlaps = self.problem.workload.training.overlap_grad_reduce
        for numbers, there, back in self._pipelines:
            times = [own[number] for own, number in zip(chunks_s, numbers, strict=True)]
            begin_s, end_s = run.spans_s(times, there, back)
            begins.append(begin_s if overlaps else end_s)
            ends.append(end_s)
        # After the pipelines come the exchange of gradients and the optimizer.
        nothing = [(0.0, 0.0)] * self.grid.num_stages
        lines = ExchangeLines(self._pace.least_exchange, nothing, ())
        lines = lines if is_quick else self._exchange_lines
        updates = [[own.memories.update_s for own in places.values()] for places in self._places]
        return lines.reduced_s(begins, ends, stages) + lines.updated_s(updates, stages)

    def _holds_chunks(self, divisions: Divisions) -> NDArray[np.bool_]:
        """Return whether the stages hold what their chunks keep, which may be unlike."""
        depth = self.grid.num_stages
        fits = [self._holds(p, divisions[:, p::depth]) for p in self._stages]
        return np.asarray(np.all(fits, axis=0))

    def _holds(self, p: int, chunks: Divisions) -> NDArray[np.bool_]:
        """Return whether stage `p` of each replica holds what such chunks keep, [division]."""
        kept = kept_chunks(self.grid.num_stages, p, self.num_chunks, self.num_micro_batches)
        fits = [place.memories.holds(chunks, kept) for place in self._places[p].values()]
        return np.asarray(np.all(fits, axis=0))

    @cached_property
    def _pipelines(self) -> list[_Pipeline]:
        """Return of each replica which of `_places` it has, and the crossings of its boundaries,
        there and back; equal replicas once."""
        found: dict[tuple[object, ...], _Pipeline] = {}
        # Virtual stages go chunk by chunk: from the last stage to the first.
        boundaries = (list(self._stages) * self.num_chunks)[:-1]
        ways_s = (own_s[:, boundaries].tolist() for own_s in self._prices.crossings_s)
        for numbers, *ways in zip(self._prices.stages.places.tolist(), *ways_s, strict=True):
            there, back = ([(busy_s, latency_s) for busy_s, latency_s in own] for own in ways)
            places = [own[number] for own, number in zip(self._places, numbers, strict=True)]
            # Equal replicas have equal ends, so that one of them is run.
            times = tuple((place.times, place.recomputed_s) for place in places)
            found.setdefault((times, *there, *back), (numbers, there, back))
        return list(found.values())

    @property
    def sends(self) -> SendMode:
        """Stock Megatron overlaps some messages of interleaved stages, and waits for the others."""
        if not self._waits:
            return "buffered"
        return "waited" if self.num_chunks == 1 else "overlapped"

    def stages_of(self, divisions: Divisions) -> Divisions:
        """Return layers of whole stages, shape [division, stage]."""
        # Virtual stages go chunk by chunk: [division, chunk, stage].
        shape = (len(divisions), self.num_chunks, self.grid.num_stages)
        return np.asarray(divisions.reshape(shape).sum(axis=1), dtype=np.int64)

    @property
    def _exchange_lines(self) -> ExchangeLines:
        prices = self._prices
        return exchange_lines(self.grid, prices.whole, prices.rows, self.settings.expert_groups)


_Pipeline = tuple[Sequence[int], list[BoundarySeconds], list[BoundarySeconds]]


@lru_cache(maxsize=256)
def _relaxed_run(
    num_stages: int, num_chunks: int, num_micro_batches: int, sends: SendMode
) -> RelaxedRun:
    return RelaxedRun(stock_schedule(num_stages, num_chunks, num_micro_batches), sends)
