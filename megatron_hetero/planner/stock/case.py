"""One way to set stock Megatron's flags but for the layers: what each division of them takes.

A case is a grid of ranks, a micro-batch size, a kind of recompute and a number of model chunks on a
stage.  Of recompute by blocks (`--recompute-method block`) each division takes as few layers as
fit, because more only take longer; none and all are the ends of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.cost.memory.stage import StageMemory, updated_bytes
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import (
    PlacedExperts,
    PlacedReplica,
    PlacedStage,
    Placement,
    Recompute,
)
from megatron_hetero.cost.placing import with_expert_groups
from megatron_hetero.cost.share import TensorShare, member_shares
from megatron_hetero.cost.work.compute import update_time_s
from megatron_hetero.cost.work.pieces import PieceTimes
from megatron_hetero.model.blocks import blocks
from megatron_hetero.model.spec import TokenDispatcher
from megatron_hetero.planner.problem import Chain, Problem
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.planner.stock.place import NEVER, StockPlace
from megatron_hetero.schedule.exchange.gradients import GradientExchange
from megatron_hetero.schedule.network import crossing
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.orders.relaxed import (
    BoundarySeconds,
    ChunkSeconds,
    RelaxedRun,
    Seconds,
)
from megatron_hetero.schedule.parts import Collective, SendMode
from megatron_hetero.schedule.programme import Schedule

StockRecompute = Literal["as needed", "none", "selective", "full"]
"""`as needed`: as few layers by blocks as fit, the same number on every stage."""

Divisions = NDArray[np.int64]
"""Layers of each virtual stage, shape [division, virtual stage]."""


@dataclass(frozen=True)
class StockSettings:
    """The flags of a case outside the grid."""

    micro_batch_size: int
    recompute: StockRecompute
    num_chunks: int = 1
    expert_groups: tuple[int, int] | None = None
    """As of `StageShape`; None divides every expert in its tensor-parallel group."""
    dispatcher: TokenDispatcher = "allgather"


class StockCase:
    """Prices every division of the layers of one case."""

    def __init__(self, problem: Problem, grid: StockGrid, settings: StockSettings) -> None:
        self.problem, self.grid, self.settings = problem, grid, settings
        training = problem.workload.training
        self._waits = training.stock_waits
        # Stock Megatron gives every replica the same part of the batch.
        sequences = training.global_batch_size // grid.num_replicas
        self.num_micro_batches = sequences // settings.micro_batch_size
        # By blocks, stages begin without recompute and get as much as they need.
        own: Recompute = "none" if settings.recompute == "as needed" else settings.recompute
        self._plain = problem.costs.dispatched(settings.dispatcher).variant(
            micro_batch_size=settings.micro_batch_size, recompute=own
        )
        self._costs = self._plain
        if training.use_distributed_optimizer:
            # With the distributed optimizer the holders divide its states; tied ends have twice as
            # many.
            number = grid.num_replicas * grid.context_parallel
            holders = StateHolders(number, number * min(grid.num_stages, 2))
            self._costs = self._plain.variant(holders=holders)
        self._rows = self._costs.vocab_rows([grid.width])
        # Replicas on like nodes have like prices, so that one of each pattern is enough.
        numbers = self._distinct_replicas()
        self._chains = [grid.chain(d) for d in numbers]
        self._places = [
            [self._place(stage, p) for p, stage in enumerate(self._stages_of_replica(d))]
            for d in numbers
        ]
        # [stage][layers], layers that recompute at least.
        self._kept = self._least_recomputed()

    def _distinct_replicas(self) -> list[int]:
        """Return the first replica of each pattern, where a pattern includes the replicas that
        share experts."""
        grid, together = self.grid, self._together
        patterns: dict[tuple[object, ...], int] = {}
        for d, own in enumerate(grid.replica_patterns):
            # Replicas come in blocks that share experts.
            first = d // together * together
            whole = grid.pattern(range(first, first + together)) if together > 1 else ()
            patterns.setdefault((own, whole), d)
        return list(patterns.values())

    @property
    def _together(self) -> int:
        """Replicas among which experts are dealt out."""
        groups = self.settings.expert_groups
        if groups is None:
            return 1
        return max(1, groups[0] * groups[1] // self.grid.ranks_of_stage)

    def _stages_of_replica(self, d: int) -> list[PlacedStage]:
        """Return the stages of a replica with a layer each, for pricing."""
        groups, together = self.settings.expert_groups, self._together
        own = self.grid.chain(d)
        if groups is None:
            return [unit.stage for unit in own]
        # Experts lie on the stages of all replicas of the block.
        start = d // together * together
        peers = [self.grid.chain(r) for r in range(start, start + together)]
        return [
            replace(
                unit.stage,
                experts=PlacedExperts(groups, tuple([g for c in peers for g in c[p].devices])),
            )
            for p, unit in enumerate(own)
        ]

    @property
    def num_virtual_stages(self) -> int:
        """Stages times chunks."""
        return self.grid.num_stages * self.settings.num_chunks

    def quick_s(self) -> float:
        """Return what no division falls below: of `pace_s` and the fill of each replica's
        pipeline."""
        found_s = [self.pace_s()]
        # Chunks fill the pipeline in parts: the bound holds for a single chunk only.
        if self.settings.num_chunks == 1:
            found_s += map(self._fill_s, self._chains, self._places)
        return max(found_s)

    def _fill_s(self, chain: Chain, places: Sequence[StockPlace]) -> float:
        """Bound by starts: stage i begins when a forward has come through those before it, works m
        times t_i, and then a backward goes back through them: T >= m t_i + sum of (t_j + hops) over
        j < i.

        A weighted mean of these holds too; the weights (not negative) make a layer count for at
        least one wherever it lies.
        """
        # Seconds of all boundaries before each stage, there and back.
        hops_s = [0.0]
        for here, there in pairwise([unit.stage for unit in chain]):
            both = (
                crossing(self._costs, here, there, self._waits),
                crossing(self._costs, there, here, self._waits),
            )
            hops_s.append(hops_s[-1] + sum(c.serialisation_s + c.latency_s for c in both))
        # From the last stage to the first, so that a stage knows the weights behind it.
        weights = fixed_s = 0.0
        for place, hop_s in zip(reversed(places), reversed(hops_s), strict=True):
            base, each = place.times
            # As much weight as makes a layer of this stage count for one, beside the later weights.
            weight = max(0.0, (1 / each.total_s - weights) / self.num_micro_batches)
            fixed_s += base.total_s * (self.num_micro_batches * weight + weights) + hop_s * weight
            weights += weight
        return (self.problem.num_layers + fixed_s) / weights

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
            longest_s = max(longest_s, base_s + self.settings.num_chunks * each_s)
        # As if layers could be cut: all stages equally long.
        period_s = (self.problem.num_layers + offset) / sum(slowness)
        return self.num_micro_batches * max(period_s, longest_s)

    def stage_layers(self, below_s: float) -> list[list[int]]:
        """Return the possible numbers of layers of each stage: within memory and with an end before
        `below_s`."""
        num_layers, chunks = self.problem.num_layers, self.settings.num_chunks
        # Every other stage keeps one layer in each chunk.
        most = num_layers - chunks * (self.grid.num_stages - 1)
        found = []
        for p in range(self.grid.num_stages):
            slowest_s = [
                self.num_micro_batches * max(places[p].total_s(n) for places in self._places)
                for n in range(num_layers + 1)
            ]
            found.append(
                [
                    n
                    for n in range(chunks, most + 1)
                    if self._kept[p][n] < NEVER and slowest_s[n] < below_s
                ]
            )
        return found

    def layers_to_recompute(self, stages: Divisions) -> Divisions:
        """Return it by blocks, for divisions of the stages, shape [division]."""
        # Stock Megatron has one number for all stages: the largest that any stage needs.
        kept = [np.array(self._kept[p])[stages[:, p]] for p in range(self.grid.num_stages)]
        return np.asarray(np.max(kept, axis=0), dtype=np.int64)

    def least_times_s(self, divisions: Divisions) -> Seconds:
        """Return a step of each division in seconds, paths that are shared left out; `inf` where
        it does not fit."""
        stages = self.stages_of(divisions)
        recomputed = self.layers_to_recompute(stages)
        # Pricing many divisions at once: each pass is an array over divisions.
        run = _relaxed_run(
            self.grid.num_stages, self.settings.num_chunks, self.num_micro_batches, self.sends
        )
        ends: list[NDArray[np.float64]] = []
        for places, there, back in self._pipelines:
            times = [
                self._chunk_times(places, p, stages, divisions, recomputed)
                for p in range(len(places))
            ]
            ends.append(run.stage_ends_s(times, there, back))
        # After the pipelines come the exchange of gradients and the optimizer.
        last_s = self._after_exchange(ends, stages)
        return np.where(recomputed < NEVER, last_s + self._update_s(stages), np.inf)

    @cached_property
    def _pipelines(self) -> list[_Pipeline]:
        """Return the places of each replica and the crossings of the replica's boundaries, there
        and back; equal replicas once."""
        found: dict[tuple[object, ...], _Pipeline] = {}
        for chain, places in zip(self._chains, self._places, strict=True):
            placed = [unit.stage for unit in chain]
            hops = list(pairwise([placed[s] for s in self.schedule.chain]))
            there, back = (
                [
                    (made.serialisation_s, made.latency_s)
                    for made in (crossing(self._costs, a, b, self._waits) for a, b in pairs)
                ]
                for pairs in (hops, [(b, a) for a, b in hops])
            )
            # Equal replicas have equal ends, so that one of them is run.
            times = tuple((place.times, place.recomputed_s) for place in places)
            found.setdefault((times, *there, *back), (places, there, back))
        return list(found.values())

    @property
    def sends(self) -> SendMode:
        """Stock Megatron overlaps the messages of interleaved stages, and waits for others."""
        return "waited" if self._waits and self.settings.num_chunks == 1 else "buffered"

    @property
    def schedule(self) -> Schedule:
        """Megatron's own."""
        return _schedule(self.grid.num_stages, self.settings.num_chunks, self.num_micro_batches)

    def stages_of(self, divisions: Divisions) -> Divisions:
        """Return layers of whole stages, shape [division, stage]."""
        # Virtual stages go chunk by chunk: [division, chunk, stage].
        shape = (len(divisions), self.settings.num_chunks, self.grid.num_stages)
        return np.asarray(divisions.reshape(shape).sum(axis=1), dtype=np.int64)

    def _frame(self, layers: Sequence[int]) -> Placement:
        frame = Placement(
            tuple(
                PlacedReplica(
                    tuple(
                        replace(u.stage, num_layers=n) for u, n in zip(chain, layers, strict=True)
                    ),
                    self.num_micro_batches,
                )
                for chain in self.grid.chains
            )
        )
        groups = self.settings.expert_groups
        return frame if groups is None else with_expert_groups(frame, groups)

    def _place(self, stage: PlacedStage, p: int) -> StockPlace:
        costs, rows, width = self._costs, self._rows, self.grid.width
        # The smallest memory of the stage's nodes decides.
        nodes = {d.node: self.problem.cluster.node_by_name[d.node] for d in stage.devices}
        node = min(nodes.values(), key=lambda n: n.gpu_type.memory_bytes)
        first, last = p == 0, p + 1 == self.grid.num_stages
        in_flight, times = num_in_flight(
            self.grid.num_stages, p, self.settings.num_chunks, self.num_micro_batches
        )

        share = self._share(stage)

        # Pieces and memory under some settings.
        def priced(plain: CostModel, costs: CostModel) -> tuple[PieceTimes, StageMemory]:
            memory = costs.memory(node, width, first, last, in_flight, rows, None, share)
            return plain.stage_pieces(stage, rows), with_times_kept(memory, times)

        # Without recompute, and with it where it is as needed.
        pieces, memory = priced(self._plain, costs)
        each = pieces.layer
        recomputed, recomputed_s = None, 0.0
        if self.settings.recompute == "as needed":
            again, recomputed = priced(
                self._plain.variant(recompute="full"), costs.variant(recompute="full")
            )
            recomputed_s = again.layer.backward_s - each.backward_s
        base = pieces.stage(0, first, last)
        # Seconds of the update without layers, and for one layer more.
        zero_s, one_s = (
            max(
                update_time_s(updated_bytes(memory, n, costs.holders), own.gpu_type)
                for own in nodes.values()
            )
            for n in (0, 1)
        )
        return StockPlace((base, each), recomputed_s, (zero_s, one_s - zero_s), memory, recomputed)

    def _share(self, stage: PlacedStage) -> TensorShare | None:
        """Return the contents of each GPU, or None for a plain equal part."""
        if stage.context_parallel == 1 and stage.experts is None:
            return None
        context, groups = stage.context_parallel, stage.expert_groups
        model = self.problem.workload.model
        return member_shares(model, stage.width, None, context, None, None, groups)[0]

    def _least_recomputed(self) -> list[list[int]]:
        """[stage][layers]: what the fullest replica has to recompute."""
        layers = range(self.problem.num_layers + 1)
        return [
            [max(places[p].least_recomputed(n) for places in self._places) for n in layers]
            for p in range(self.grid.num_stages)
        ]

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
        if self.settings.num_chunks == 1:
            return [(np.asarray(forward_s), np.asarray(backward_s))]
        # FLOPs decide the parts: the head counts on the last chunk of the last stage.
        _, layer, *_, head = blocks(self.problem.workload)
        layer_flops, head_flops = (
            b.matmul_flops_forward + b.attention_flops_forward for b in (layer, head)
        )
        head_flops *= p + 1 == self.grid.num_stages
        total = num_layers * layer_flops + head_flops
        found = []
        for chunk in range(self.settings.num_chunks):
            held = divisions[:, chunk * self.grid.num_stages + p] * layer_flops
            if chunk + 1 == self.settings.num_chunks:
                held = held + head_flops
            found.append((forward_s * held / total, backward_s * held / total))
        return found

    def _after_exchange(self, ends: Sequence[NDArray[np.float64]], stages: Divisions) -> Seconds:
        """Return when all gradients are reduced.

        Each stage's all-reduce by itself, then those of tied embeddings; what overlaps with the
        last backward passes is left out.
        """
        gradients, _, tied_s = self._exchange_lines
        slowest_s = np.max(ends, axis=0)
        # [stage]: when its gradients are reduced, after its last backward pass in any replica.
        last_s = [
            np.asarray(slowest_s[p] + zero_s + each_s * n)
            for p, ((zero_s, each_s), n) in enumerate(zip(gradients, stages.T, strict=True))
        ]
        # Tied embeddings wait for both ends.
        both_s = np.maximum(last_s[0], last_s[-1])
        return np.asarray(np.max([*last_s, *(both_s + s for s in tied_s)], axis=0))

    def _update_s(self, stages: Divisions) -> Seconds:
        """Return seconds of the optimizer, and with the distributed one the new weights, of the
        slowest stage."""
        _, weights, _ = self._exchange_lines
        found = []
        for p, (zero_s, each_s) in enumerate(weights):
            for places in self._places:
                own_zero_s, own_each_s = places[p].update_s
                found.append(own_zero_s + zero_s + (own_each_s + each_s) * stages[:, p])
        return np.asarray(np.max(found, axis=0))

    @property
    def _exchange_lines(self) -> tuple[list[_Line], list[_Line], list[float]]:
        """Return `_priced_exchange`, which micro-batches and recompute do not change."""
        grid, groups = self.grid, self.settings.expert_groups
        key = "exchange", *grid.shape, groups
        if key not in grid.ranks.known:
            grid.ranks.known[key] = self._priced_exchange()
        return cast(_ExchangeLines, grid.ranks.known[key])

    def _priced_exchange(self) -> tuple[list[_Line], list[_Line], list[float]]:
        """Return seconds without layers and what each layer adds, of the gradients and of the new
        weights of each stage; then seconds of each replica's tied embeddings.

        What overlaps has as many buckets as there are layers, and is left out; so is the exchange
        of another trainer.
        """
        is_left_out = self.problem.workload.training.overlap_grad_reduce or not self._waits
        # A single replica exchanges nothing but tied embeddings.
        if self.grid.num_replicas == 1 and self.grid.context_parallel == 1:
            alone: list[_Line] = [(0.0, 0.0)] * self.grid.num_stages
            if not self.problem.workload.model.tied_embeddings or not self._waits:
                return alone, alone, []
        num_stages = self.grid.num_stages
        nothing: list[_Line] = [(0.0, 0.0)] * num_stages
        # Prices with one layer and with two give the line: what a layer adds, and what is left.
        one = self._collectives(1)
        # A collective over several stages is that of a tied embedding.
        tied_s = [_seconds(c) for c in one[0] if len({stage for _, stage in c.holders}) > 1]
        if not self._waits:
            tied_s = []
        if is_left_out:
            return nothing, nothing, tied_s
        gradients, weights = (
            [
                (2 * a - b, b - a)
                for a, b in zip(
                    _of_stages_s(of_one, num_stages), _of_stages_s(of_two, num_stages), strict=True
                )
            ]
            for of_one, of_two in zip(one, self._collectives(2), strict=True)
        )
        return gradients, weights, tied_s

    def _collectives(self, num_layers: int) -> tuple[tuple[Collective, ...], ...]:
        """Return stock Megatron's collectives of gradients and of new weights, with so many layers
        on every stage."""
        frame = self._frame([num_layers] * self.grid.num_stages)
        return GradientExchange(self._costs, frame, self._rows, {}, {}).stock()


_Pipeline = tuple[Sequence[StockPlace], list[BoundarySeconds], list[BoundarySeconds]]
_Line = tuple[float, float]
_ExchangeLines = tuple[list[_Line], list[_Line], list[float]]


def num_in_flight(
    num_stages: int, p: int, num_chunks: int, num_micro_batches: int
) -> tuple[int, float]:
    """Return the micro-batches kept by a stage at the peak, and a factor. The factor is 1 for a
    single chunk. An interleaved stage keeps chunks of micro-batches (`get_pp_rank_microbatches`),
    so its number is 1 and its factor the kept micro-batches, as the simulation finds with equal
    chunks."""
    if num_chunks == 1:
        # 1F1B: as many as there are stages from this one on.
        return min(num_stages - p, num_micro_batches), 1.0
    # Megatron's warm-up of interleaved stages, and the one in the steady state.
    chunks = 2 * (num_stages - p - 1) + (num_chunks - 1) * num_stages + 1
    return 1, min(chunks / num_chunks, num_micro_batches)


def with_times_kept(memory: StageMemory, times: float) -> StageMemory:
    """Return the memory of a stage that keeps so many times the activations."""
    if times == 1.0:
        return memory
    part = "activations"
    return replace(
        memory,
        base={**memory.base, part: int(times * memory.base[part])},
        per_layer={**memory.per_layer, part: int(times * memory.per_layer[part])},
        kinds=(),
    )


@lru_cache(maxsize=64)
def _schedule(num_stages: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    if num_chunks == 1:
        return one_f_one_b(num_stages, num_micro_batches)
    return interleaved(tuple(range(num_stages)) * num_chunks, num_micro_batches)


@lru_cache(maxsize=256)
def _relaxed_run(
    num_stages: int, num_chunks: int, num_micro_batches: int, sends: SendMode
) -> RelaxedRun:
    return RelaxedRun(_schedule(num_stages, num_chunks, num_micro_batches), sends)


def _of_stages_s(collectives: Sequence[Collective], num_stages: int) -> list[float]:
    """Add up the seconds of each stage's own collectives, in the replica with the largest sum:
    experts dealt out are exchanged among some of the replicas, the other parameters beside
    these."""
    found: list[dict[int, float]] = [{} for _ in range(num_stages)]
    for collective in collectives:
        stages = {s for _, s in collective.holders}
        if len(stages) == 1:
            own, seconds = found[stages.pop()], _seconds(collective)
            for r, _ in collective.holders:
                own[r] = own.get(r, 0.0) + seconds
    return [max(own.values(), default=0.0) for own in found]


def _seconds(collective: Collective) -> float:
    return max((s for _, s in collective.hops), default=0.0) + collective.latency_s
