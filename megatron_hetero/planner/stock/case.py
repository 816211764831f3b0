"""One way to set stock Megatron's flags but for the layers: what each division of them takes.

A case is a grid of ranks, a micro-batch size, a kind of recompute and a number of model chunks on a
stage.  Of recompute by blocks (`--recompute-method block`) each division takes as few layers as
fit, because more only take longer; none and all are the ends of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.model.blocks import blocks
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.divisions import Divisions
from megatron_hetero.planner.stock.exchange import ExchangeLines, exchange_lines
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.planner.stock.in_flight import most_kept, stock_schedule
from megatron_hetero.planner.stock.place import NEVER, StockPlace
from megatron_hetero.planner.stock.prices import StockPrices
from megatron_hetero.planner.stock.settings import StockSettings
from megatron_hetero.schedule.parts import SendMode
from megatron_hetero.schedule.programme import Schedule
from megatron_hetero.schedule.simulator.relaxed import (
    BoundarySeconds,
    ChunkSeconds,
    RelaxedRun,
    Seconds,
)


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
        self._replicas = self._prices.distinct_replicas()
        self._places = [self._prices.places(d) for d in self._replicas]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.problem.num_layers

    @property
    def num_chunks(self) -> int:
        """Chunks of each stage."""
        return self.settings.num_chunks

    @property
    def num_virtual_stages(self) -> int:
        """Stages times chunks."""
        return self.grid.num_stages * self.num_chunks

    def quick_s(self) -> float:
        """Return what no division falls below: of `pace_s` and the fill of each replica's
        pipeline."""
        found_s = [self.pace_s()]
        # Chunks fill the pipeline in parts: the bound holds for a single chunk only.
        if self.num_chunks == 1:
            found_s += map(self._fill_s, self._replicas, self._places)
        return max(found_s)

    def _fill_s(self, d: int, places: Sequence[StockPlace]) -> float:
        """Bound by starts: stage i begins when a forward has come through those before it, works m
        times t_i, and then a backward goes back through them: T >= m t_i + sum of (t_j + hops) over
        j < i.

        A weighted mean of these holds too; the weights (not negative) make a layer count for at
        least one wherever it lies.
        """
        # Seconds of all boundaries before each stage, there and back.
        hops_s = [0.0]
        for here, there in pairwise(range(self.grid.num_stages)):
            both = self._prices.crossing_s(d, here, there), self._prices.crossing_s(d, there, here)
            hops_s.append(hops_s[-1] + sum(map(sum, both)))
        # From the last stage to the first, so that a stage knows the weights behind it.
        weights = fixed_s = 0.0
        for place, hop_s in zip(reversed(places), reversed(hops_s), strict=True):
            base, each = place.times
            # As much weight as makes a layer of this stage count for one, beside the later weights.
            weight = max(0.0, (1 / each.total_s - weights) / self.num_micro_batches)
            fixed_s += base.total_s * (self.num_micro_batches * weight + weights) + hop_s * weight
            weights += weight
        return (self.num_layers + fixed_s) / weights

    def pace_s(self) -> float:
        """Return the work of all stages, in fractions of layers."""
        slowness, offset = [], 0.0
        longest_s = 0.0
        for p in range(self.grid.num_stages):
            # Replicas run the same division: the slowest layer and the least base of any of them.
            each_s = max(places[p].times[1].total_s for places in self._places)
            base_s = min(places[p].times[0].total_s for places in self._places)
            slowness.append(1 / each_s)
            offset += base_s / each_s
            longest_s = max(longest_s, base_s + self.num_chunks * each_s)
        # As if layers could be cut: all stages equally long.
        period_s = (self.num_layers + offset) / sum(slowness)
        return self.num_micro_batches * max(period_s, longest_s)

    def stage_layers(self, below_s: float) -> list[list[int]]:
        """Return the possible numbers of layers of each stage: within memory and with an end before
        `below_s`."""
        chunks = self.num_chunks
        # Every other stage keeps one layer in each chunk.
        most = self.num_layers - chunks * (self.grid.num_stages - 1)
        may = (self._kept < NEVER) & (self._slowest_s < below_s)
        return [(np.flatnonzero(own[chunks : most + 1]) + chunks).tolist() for own in may]

    @cached_property
    def _slowest_s(self) -> NDArray[np.float64]:
        """Passes of the slowest replica without recompute by blocks, [stage, layers]."""
        layers = np.arange(self.num_layers + 1)
        each = [[places[p].total_s(layers) for places in self._places] for p in self._stages]
        return np.asarray(self.num_micro_batches * np.max(each, axis=1))

    @cached_property
    def _kept(self) -> NDArray[np.int64]:
        """What the fullest replica has to recompute, [stage, layers]."""
        each = [[places[p].least_recomputed for places in self._places] for p in self._stages]
        return np.asarray(np.max(each, axis=1))

    @property
    def _stages(self) -> range:
        return range(self.grid.num_stages)

    def layers_to_recompute(self, stages: Divisions) -> Divisions:
        """Return it by blocks, for divisions of the stages, shape [division]."""
        # Stock Megatron has one number for all stages: the largest that any stage needs.
        kept = [self._kept[p][stages[:, p]] for p in self._stages]
        return np.asarray(np.max(kept, axis=0), dtype=np.int64)

    def least_times_s(self, divisions: Divisions) -> Seconds:
        """Return a step of each division in seconds, paths that are shared left out; `inf` where
        it does not fit."""
        stages = self.stages_of(divisions)
        recomputed = self.layers_to_recompute(stages)
        fits = recomputed < NEVER
        if self.num_chunks > 1:
            fits &= self._holds_chunks(divisions, stages)
        found = np.full(len(divisions), np.inf)
        if fits.any():
            found[fits] = self._times_s(divisions[fits], stages[fits], recomputed[fits])
        return found

    def _times_s(self, divisions: Divisions, stages: Divisions, recomputed: Divisions) -> Seconds:
        # Pricing many divisions at once: each pass is an array over divisions.
        run = _relaxed_run(
            self.grid.num_stages, self.num_chunks, self.num_micro_batches, self.sends
        )
        ends: list[NDArray[np.float64]] = []
        for places, there, back in self._pipelines:
            times = [
                self._chunk_times(places, p, stages, divisions, recomputed)
                for p in range(len(places))
            ]
            ends.append(run.stage_ends_s(times, there, back))
        # After the pipelines come the exchange of gradients and the optimizer.
        return self._after_exchange(ends, stages) + self._update_s(stages)

    def _holds_chunks(self, divisions: Divisions, stages: Divisions) -> NDArray[np.bool_]:
        """Return whether the stages hold what their chunks keep, which may be unlike."""
        depth = self.grid.num_stages
        fits = np.full(len(divisions), True)
        for p in range(depth):
            # Of the activations of all layers of the stage, those that are kept at the peak.
            kept = most_kept(depth, p, self.num_micro_batches, divisions[:, p::depth])
            for places in self._places:
                fits &= places[p].holds(stages[:, p], kept)
        return fits

    @cached_property
    def _pipelines(self) -> list[_Pipeline]:
        """Return the places of each replica and the crossings of the replica's boundaries, there
        and back; equal replicas once."""
        found: dict[tuple[object, ...], _Pipeline] = {}
        chain = tuple(self._stages) * self.num_chunks
        for d, places in zip(self._replicas, self._places, strict=True):
            there = [self._prices.crossing_s(d, a, b) for a, b in pairwise(chain)]
            back = [self._prices.crossing_s(d, b, a) for a, b in pairwise(chain)]
            # Equal replicas have equal ends, so that one of them is run.
            times = tuple((place.times, place.recomputed_s) for place in places)
            found.setdefault((times, *there, *back), (places, there, back))
        return list(found.values())

    @property
    def sends(self) -> SendMode:
        """Stock Megatron overlaps some messages of interleaved stages, and waits for the others."""
        if not self._waits:
            return "buffered"
        return "waited" if self.num_chunks == 1 else "overlapped"

    @property
    def schedule(self) -> Schedule:
        """Megatron's own."""
        return stock_schedule(self.grid.num_stages, self.num_chunks, self.num_micro_batches)

    def stages_of(self, divisions: Divisions) -> Divisions:
        """Return layers of whole stages, shape [division, stage]."""
        # Virtual stages go chunk by chunk: [division, chunk, stage].
        shape = (len(divisions), self.num_chunks, self.grid.num_stages)
        return np.asarray(divisions.reshape(shape).sum(axis=1), dtype=np.int64)

    def _chunk_times(
        self,
        places: Sequence[StockPlace],
        p: int,
        stages: Divisions,
        divisions: Divisions,
        recomputed: Divisions,
    ) -> list[ChunkSeconds]:
        """Return the seconds of a stage's passes, divided among the chunks by FLOPs
        (`schedule.orders.chunk_times`)."""
        place, num_layers = places[p], stages[:, p]
        base, each = place.times
        forward_s = base.forward_s + each.forward_s * num_layers
        # Recomputed layers of a stage are not more than it has.
        again = np.minimum(recomputed, num_layers)
        backward_s = base.backward_s + each.backward_s * num_layers + place.recomputed_s * again
        if self.num_chunks == 1:
            return [(np.asarray(forward_s), np.asarray(backward_s))]
        # FLOPs decide the parts: the head counts on the last chunk of the last stage.
        _, layer, *_, head = blocks(self.problem.workload)
        layer_flops, head_flops = (
            b.matmul_flops_forward + b.attention_flops_forward for b in (layer, head)
        )
        head_flops *= p + 1 == self.grid.num_stages
        total = num_layers * layer_flops + head_flops
        found = []
        for chunk in range(self.num_chunks):
            held = divisions[:, chunk * self.grid.num_stages + p] * layer_flops
            if chunk + 1 == self.num_chunks:
                held = held + head_flops
            found.append((forward_s * held / total, backward_s * held / total))
        return found

    def _after_exchange(self, ends: Sequence[NDArray[np.float64]], stages: Divisions) -> Seconds:
        """Return when all gradients are reduced.

        Each stage's all-reduce by itself, then those of tied embeddings; what overlaps with the
        last backward passes is left out.
        """
        lines = self._exchange_lines
        slowest_s = np.max(ends, axis=0)
        # [stage]: when its gradients are reduced, after its last backward pass in any replica.
        last_s = [
            np.asarray(slowest_s[p] + zero_s + each_s * n)
            for p, ((zero_s, each_s), n) in enumerate(zip(lines.gradients, stages.T, strict=True))
        ]
        # Tied embeddings wait for both ends.
        both_s = np.maximum(last_s[0], last_s[-1])
        return np.asarray(np.max([*last_s, *(both_s + s for s in lines.tied_s)], axis=0))

    def _update_s(self, stages: Divisions) -> Seconds:
        """Return seconds of the optimizer, and with the distributed one the new weights, of the
        slowest stage."""
        found = []
        for p, (zero_s, each_s) in enumerate(self._exchange_lines.weights):
            for places in self._places:
                own_zero_s, own_each_s = places[p].update_s
                found.append(own_zero_s + zero_s + (own_each_s + each_s) * stages[:, p])
        return np.asarray(np.max(found, axis=0))

    @property
    def _exchange_lines(self) -> ExchangeLines:
        prices = self._prices
        return exchange_lines(self.grid, prices.whole, prices.rows, self.settings.expert_groups)


_Pipeline = tuple[Sequence[StockPlace], list[BoundarySeconds], list[BoundarySeconds]]


@lru_cache(maxsize=256)
def _relaxed_run(
    num_stages: int, num_chunks: int, num_micro_batches: int, sends: SendMode
) -> RelaxedRun:
    return RelaxedRun(stock_schedule(num_stages, num_chunks, num_micro_batches), sends)
