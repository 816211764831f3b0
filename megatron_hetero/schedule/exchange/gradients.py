"""The exchange of a plan's gradients, and of new weights, as collectives on the cluster's paths.

Our runtime starts its buckets (`cost.sync.buckets`) in one order, as many at a time as find room
(`cost.sync.room`): an all-reduce of each, or, with the distributed optimizer, each part straight to
its owner, and after the update the new weights back; where the plan names groups of machines, group
by group.  Stock Megatron reduces a stage's whole buffer at once, and after it a
tied embedding between the first and the last stage.

With `--overlap-grad-reduce` the first stage begins within its last backward pass, the others after
theirs (`--align-grad-reduce`, Megatron's default); stock Megatron divides the buffer of its first
stages into buckets then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_hetero.cost.memory.states import new_weight_bytes, state_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.sync.buckets import (
    EMBEDDING,
    StageBucket,
    StageId,
    num_rank_sets,
    stage_buckets,
)
from megatron_hetero.cost.sync.gradients import NO_LIMIT
from megatron_hetero.cost.sync.groups import buffers_of, groups_of
from megatron_hetero.exchange.plan import Purpose
from megatron_hetero.schedule.exchange.early import LastBackward, with_room
from megatron_hetero.schedule.exchange.first_use import (
    NO_FORWARDS,
    ForwardLayers,
    in_order_of_use,
    stock_in_order_of_use,
)
from megatron_hetero.schedule.exchange.rank_sets import RankSet, rank_sets
from megatron_hetero.schedule.exchange.stock_buckets import StockBuckets
from megatron_hetero.schedule.exchange.taken import (
    Taken,
    taken_by_groups,
    taken_directly,
    taken_in_ring,
)
from megatron_hetero.schedule.parts import Collective, Final


class GradientExchange:
    """The collectives of one plan.

    Args:
        last_backward: of the first stages, which overlap with `--overlap-grad-reduce`.
        owner_weights: relative size of the optimizer state that each rank of a stage keeps.
        chunk_layers: layers of the model chunks of interleaved stages.
        rooms: bytes for buckets under way, by stage (`CostModel.rooms`); without, for all.
        forwards: of all stages, where new weights travel during first forward passes; without,
            they are waited for after the update.
    """

    def __init__(
        self,
        costs: CostModel,
        placement: Placement,
        vocab_rows: int,
        last_backward: Mapping[StageId, LastBackward],
        owner_weights: Mapping[StageId, int],
        chunk_layers: Mapping[StageId, Sequence[int]] | None = None,
        rooms: Mapping[StageId, int] = NO_LIMIT,
        forwards: Mapping[StageId, ForwardLayers] = NO_FORWARDS,
    ) -> None:
        self._rooms, self._forwards = rooms, forwards
        self._costs, self._placement = costs, placement
        self._chunk_layers = chunk_layers or {}
        self._vocab_rows = vocab_rows
        self._last_backward = last_backward
        self._owner_weights = owner_weights
        training = costs.workload.training
        self._states = state_bytes(training)
        self._is_divided = training.use_distributed_optimizer
        self._overlaps = training.overlap_grad_reduce

    def ours(self) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """Build the collectives of gradients, and of new weights, in our runtime."""
        # All-reduce: one collective a bucket; divided: one for each set of its ranks.
        model = self._costs.workload.model
        buckets = stage_buckets(
            self._placement, model, self._vocab_rows, whole_apart=self._is_divided
        )
        if not self._is_divided:
            return with_room([(b, self._all_reduce(b)) for b in buckets]), ()
        sets = [(b, ranks) for b in buckets for ranks in rank_sets(self._placement, b)]
        return (
            with_room([(b, self._to_owners(b, ranks)) for b, ranks in sets]),
            in_order_of_use([(b, self._gather(b, ranks)) for b, ranks in sets], self._forwards),
        )

    def stock(
        self, *, whole: bool = False
    ) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """Build the collectives of gradients, and of new weights, in stock Megatron.

        Args:
            whole: as without `--overlap-grad-reduce`.
        """
        # Buckets of the layers on each stage, in Megatron's order.
        model, replicas = self._costs.workload.model, self._placement.replicas
        training = self._costs.workload.training
        if whole:
            training = replace(training, overlap_grad_reduce=False)
        overlaps = training.overlap_grad_reduce
        of_stages = StockBuckets(
            self._placement, model, training, self._vocab_rows, self._chunk_layers
        )
        # A single replica exchanges nothing over the data-parallel group.
        is_shared = len(replicas) > 1 or self._placement.has_context_parallel
        buckets = list(of_stages) if is_shared else []
        # The distributed optimizer's reduce-scatter is one pass of the ring, an all-reduce is two.
        passes = 1 if self._is_divided else 2
        gradients = []
        for bucket, chunk in buckets:
            # Without overlap Megatron waits for each before the next.
            made = self._ring(
                bucket, "gradients", passes, {} if overlaps else _all_buffers(bucket)
            )
            # With overlap a chunk's bucket may go once the chunk's last backward pass has ended.
            if chunk is not None and overlaps:
                made = replace(made, final=dict.fromkeys(bucket.holders, Final(chunk)))
            gradients.append(made)
        # Experts dealt out over replicas have groups of their own, and wait for all gradients.
        of_experts = list(of_stages.of_experts())
        gradients += [
            self._ring(b, "gradients", passes, _all_buffers(b), is_final=True, groups=groups)
            for b, groups in of_experts
        ]
        # First and last stage of a replica add up their copies of the word embedding.
        num_stages = len(replicas[0].stages)
        if model.copies_words and num_stages > 1:
            words = self._vocab_rows * model.hidden_size
            for r in range(len(replicas)):
                tied = StageBucket(((r, 0), (r, num_stages - 1)), words, EMBEDDING)
                gradients.append(
                    self._ring(tied, "gradients", 2, _all_buffers(tied), is_final=True)
                )
        # All-reduced weights are updated everywhere; divided ones are gathered after the update.
        if not self._is_divided:
            return tuple(gradients), ()
        dense = sorted(buckets, key=lambda entry: entry[1] or 0)
        gathers = [(b, chunk, self._ring(b, "weights", 1, _all_buffers(b))) for b, chunk in dense]
        gathers += [
            (b, 0, self._ring(b, "weights", 1, _all_buffers(b), groups=g)) for b, g in of_experts
        ]
        return tuple(gradients), stock_in_order_of_use(gathers, self._forwards)

    def _by_groups(
        self,
        holders: Sequence[PlacedStage],
        purpose: Purpose,
        num_bytes: float,
        rank_bytes: float,
        weights: Sequence[int] | None = None,
    ) -> Taken | None:
        """Return `taken_by_groups`; None where the plan has no groups, or all are in one."""
        costs, groups = self._costs, self._placement.exchange_groups
        if not groups:
            return None
        return taken_by_groups(
            costs.cluster,
            costs.workload.model,
            holders,
            groups,
            purpose,
            (num_bytes, rank_bytes),
            weights,
            self._placement.exchange_uplinks,
        )

    def _in_ring(
        self, groups: Sequence[PlacedStage], num_passes: int, num_bytes: float, reduces: bool
    ) -> Taken:
        ring = self._costs.ring(groups)
        return taken_in_ring(self._costs.cluster, ring, num_passes, num_bytes, reduces=reduces)

    def _final(self, bucket: StageBucket) -> dict[StageId, Final]:
        """Find the times at which gradients are exchanged before a stage's programme is done."""
        if not self._overlaps or self._placement.has_idle_rounds:
            return {}
        found = {}
        # Other stages than the first: when the last backward pass of their first chunk ends.
        for holder in bucket.holders:
            own = self._last_backward.get(holder)
            found[holder] = Final() if own is None else own.in_last_pass(bucket.layer)
        return found

    def _all_reduce(self, bucket: StageBucket) -> Collective:
        """Build an all-reduce: group by group, or in a ring."""
        groups = groups_of(self._placement, bucket.holders)
        num_bytes = bucket.num_params * self._states.gradient
        num_sets = num_rank_sets(groups)
        by_groups = self._by_groups(groups, "all_reduce", num_bytes, num_bytes / num_sets)
        buffers = self._buffers(bucket, num_sets, num_bytes / num_sets, by_groups is not None)
        if by_groups is None:
            made = self._ring(bucket, "gradients", 2)
        else:
            name = f"gradients of {_words(bucket.holders)}"
            made = Collective(name, bucket.holders, *by_groups, final=self._final(bucket))
        # Buckets of ranks that find no room together go in turns, each with the latency.
        turns = max(1.0, *buffers.values()) if buffers else 1.0
        all_of_it = {holder: min(part, 1.0) for holder, part in buffers.items()}
        return replace(made, latency_s=turns * made.latency_s, buffers=all_of_it)

    def _buffers(
        self, bucket: StageBucket, num_sets: int, rank_bytes: float, is_received: bool
    ) -> dict[StageId, float]:
        """Return the parts of the holders' rooms taken by a bucket, as
        `cost.sync.groups.buffers_of`."""
        # Without rooms all buckets may be under way at once.
        rooms = {holder: self._rooms[holder] for holder in bucket.holders if self._rooms}
        return buffers_of(
            self._placement,
            rooms,
            num_sets,
            rank_bytes,
            is_packed=self._is_divided,
            is_received=is_received,
        )

    def _ring(
        self,
        bucket: StageBucket,
        what: str,
        num_passes: int,
        buffers: Mapping[StageId, float] | None = None,
        is_final: bool = False,
        groups: Sequence[PlacedStage] = (),
    ) -> Collective:
        """Build a ring over the first ranks of the holders; the others work beside them, pair by
        pair.

        An all-reduce is two passes of (n - 1) / n of the buffer over every hop, a reduce-scatter or
        an all-gather one.

        Args:
            bucket: what is exchanged.
            what: gradients or weights.
            num_passes: one or two.
            buffers: of its holders; None is none.
            is_final: all gradients have to be there.
            groups: of ranks that hold it; by default all of its holders.
        """
        num_bytes = bucket.num_params * self._states.gradient
        if what == "weights":  # fewer bytes, of some only one
            training = self._costs.workload.training
            num_bytes = new_weight_bytes(training, bucket.num_params, bucket.num_in_matrices)
        groups = groups or groups_of(self._placement, bucket.holders)
        taken = self._in_ring(groups, num_passes, num_bytes, reduces=what == "gradients")
        return Collective(
            f"{what} of {_words(bucket.holders)}",
            bucket.holders,
            *taken,
            buffers or {},
            {} if is_final or what == "weights" else self._final(bucket),
        )

    def _gather(self, bucket: StageBucket, ranks: RankSet) -> Collective:
        """Gather the new weights from their owners to all ranks, in a ring."""
        # Each rank is a holder by itself, and owns what its weight says.
        alone = [PlacedStage((member.device,), 1) for member in ranks.members]
        num_bytes = ranks.num_params * self._states.weight
        weights = [self._owner_weights[member.stage] for member in ranks.members]
        made = self._by_groups(alone, "all_gather", num_bytes, num_bytes, weights)
        taken = made or self._in_ring(alone, 1, num_bytes, reduces=False)
        name, buffers = f"weights of {_words(bucket.holders)}", self._divided_buffers(bucket, ranks)
        return Collective(name, bucket.holders, *taken, buffers, places=ranks.places)

    def _to_owners(self, bucket: StageBucket, ranks: RankSet) -> Collective:
        """Send each rank's gradients directly to their owners; an owner adds received parts while
        other ranks use the paths."""
        num_bytes = ranks.num_params * self._states.gradient
        # Owners in proportion to their weights; each rank is a holder by itself.
        weights = [self._owner_weights[member.stage] for member in ranks.members]
        alone = [PlacedStage((member.device,), 1) for member in ranks.members]
        # By groups of machines where the plan says so, else every pair directly.
        made = self._by_groups(alone, "reduce_scatter", num_bytes, num_bytes, weights)
        taken = made or taken_directly(
            self._costs.cluster, [member.device for member in ranks.members], weights, num_bytes
        )
        return Collective(
            f"gradients of {_words(bucket.holders)}",
            bucket.holders,
            *taken,
            self._divided_buffers(bucket, ranks),
            self._final(bucket),
            ranks.places,
        )

    def _divided_buffers(self, bucket: StageBucket, ranks: RankSet) -> dict[StageId, float]:
        """Return the seconds of a bucket on a set of ranks; new weights count like gradients."""
        return self._buffers(bucket, 1, ranks.num_params * self._states.gradient, is_received=True)


def _all_buffers(bucket: StageBucket) -> dict[StageId, float]:
    return dict.fromkeys(bucket.holders, 1.0)


def _words(holders: Sequence[StageId]) -> str:
    return ", ".join(f"replica {r} stage {s}" for r, s in holders)
