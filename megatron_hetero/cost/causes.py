"""Causes of a stage's time: the parts that its price is the sum of, told apart.

Nothing is priced anew: products, attention and work bound by memory are those that
`cost.work.compute` adds up, communication is that of the pieces, and what the host's launches take
is what a piece lasts beyond all of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.placement import PlacedReplica
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.stage_prices import StagePrices
from megatron_hetero.cost.work.compute import PartSeconds, PassTimes, part_seconds
from megatron_hetero.cost.work.context_parallel import merging_times
from megatron_hetero.cost.work.ends import (
    embedding_times,
    head_product,
    head_times,
    joining_product,
    joining_times,
)
from megatron_hetero.cost.work.layer_work import attention_work, mlp_work
from megatron_hetero.cost.work.pieces import PieceSource, PieceTimes
from megatron_hetero.cost.work.products import Product
from megatron_hetero.cost.work.profile import Piece
from megatron_hetero.cost.work.speed import speed_of


@dataclass(frozen=True)
class StageCauses:
    """Seconds of a stage's forward and backward pass over one micro-batch, by cause; they sum to
    the stage's time.

    `attention_s` is what lies between the two products of attention, `memory_s` norms, activations,
    rotation, losses, the rounds of a context-parallel ring put together and gradients'
    accumulation, `launches_s` the wait for the host beyond all that
    the GPU has to do, `communication_s` that of tensor, context and expert parallelism and of
    sharded layers.
    """

    products_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    launches_s: float = 0.0
    communication_s: float = 0.0

    def __add__(self, other: StageCauses) -> StageCauses:
        return StageCauses(*(getattr(self, n) + getattr(other, n) for n in _NAMES))

    def times(self, factor: float) -> StageCauses:
        """Return all causes so many times."""
        return StageCauses(*(factor * getattr(self, n) for n in _NAMES))

    @property
    def total_s(self) -> float:
        """Return the sum of all causes."""
        return float(sum(getattr(self, n) for n in _NAMES))


_NAMES = tuple(field.name for field in fields(StageCauses))


def stage_causes(costs: StagePrices, replica: PlacedReplica, index: int, rows: int) -> StageCauses:
    """Tell the causes of the time of stage `index` of a replica.

    Args:
        costs: the prices of the step; `rows` is the padded vocabulary.
        index: the stage's place in the replica.
    """
    # The causes sum to this price, whatever they are told apart by.
    total_s = costs.stage(replica, index, rows).times.total_s
    if replica.stages[index].sharding is not None:
        # Its weights travel in each pass, and it waits for the replicas that use them as well.
        own = stage_causes(costs, replica.without_sharding, index, rows)
        return replace(own, communication_s=own.communication_s + total_s - own.total_s)
    found = causes_of_pieces(costs, replica, index, rows)
    # A profile's stretch, and groups with unlike parts of a sequence, each pass as the slowest.
    return found.times(total_s / found.total_s)


def causes_of_pieces(
    costs: StagePrices, replica: PlacedReplica, index: int, rows: int
) -> StageCauses:
    """Sum the causes of a stage's layers and ends, without the stretch that a profile may have.

    Args:
        costs, replica, index, rows: as of `stage_causes`.
    """
    stage, model = replica.stages[index], costs.workload.model
    # Pieces in the stage's settings, and without recompute for layers that are kept.
    own_costs = costs.variant(micro_batch_size=replica.micro_batch_size).of_stage(stage)
    pieces = own_costs.variant(recompute=stage.recompute).stage_pieces(stage, rows)
    kept = own_costs.variant(recompute="none").stage_pieces(stage, rows)
    num_layers, again = stage.num_layers, stage.recompute_num_layers
    # Layers of each kind on the stage; one number where all are alike.
    counts: Sequence[int] = (num_layers,)
    if model.kinds:
        counts = model.kind_counts(replica.first_layers[index], num_layers)
    # Layers, of which some may not be recomputed, and the ends of the model.
    found = StageCauses()
    if again is None:
        found += _layers(pieces, counts, num_layers, num_layers)
    else:
        found += _layers(pieces, counts, again, num_layers)
        found += _layers(kept, counts, num_layers - again, num_layers)
    if index == 0:
        found += _of_piece(_first_kind(pieces), "embedding")
    if index == len(replica.stages) - 1:
        # The head comes behind a layer of the last layer's kind.
        last = pieces.kinds[model.kind_of(model.num_layers - 1)] if pieces.kinds else pieces
        found += _of_head(last)
        if index == 0:
            found = replace(found, memory_s=found.memory_s + pieces.tied_s)
    return found


def _layers(
    pieces: PieceTimes, counts: Sequence[int], num_layers: int, num_all: int
) -> StageCauses:
    """Tell the causes of `num_layers` layers, which are of each kind as all of the stage are."""
    found = StageCauses()
    for kind, count in zip(pieces.kinds or (pieces,), counts, strict=True):
        found += _of_piece(kind, "decoder_layer").times(count * num_layers / num_all)
    return found


def _first_kind(pieces: PieceTimes) -> PieceTimes:
    return pieces.kinds[0] if pieces.kinds else pieces


def _of_head(pieces: PieceTimes) -> StageCauses:
    """Tell the causes of the head, with the layers that predict further tokens."""
    found = _of_piece(pieces, "head")
    assert pieces.source is not None
    workload, members = pieces.source.workload, pieces.source.members
    # Each layer for a further token embeds, joins, computes a layer, and has a head again.
    if number := workload.model.mtp_num_layers:
        further = found + _of_piece(pieces, "embedding") + _of_piece(pieces, "decoder_layer")
        further += _sum(_slowest(_joining(pieces.source, *member) for member in members))
        found += further.times(number)
    return found


def _of_piece(pieces: PieceTimes, piece: Piece) -> StageCauses:
    """Tell the causes of a piece.

    A time that rests on a profile is divided as the model divides its own; else what is left is the
    host's.
    """
    source = pieces.source
    assert source is not None
    if piece == "decoder_layer":
        found = StageCauses()
        for work_of in (attention_work, mlp_work):
            found += _sum(
                _slowest(
                    part_seconds(source.workload, gpu, share, work_of)
                    for gpu, share in source.members
                )
            )
        merging_s = merging_times(source.workload, source.members).total_s
        found = replace(found, memory_s=found.memory_s + merging_s)
    else:
        # The ends: a lookup in memory, or a product with the vocabulary.
        of = _embedding if piece == "embedding" else _head
        found = _sum(_slowest(of(source, *member) for member in source.members))
    # Communication is priced apart; what the price has beyond all causes waits for the host.
    found = replace(found, communication_s=source.communication[piece].total_s)
    total_s = source.times[piece].total_s
    if piece in source.gauged:
        return found.times(total_s / found.total_s)
    return replace(found, launches_s=max(0.0, total_s - found.total_s))


def _slowest(members: Iterable[PartSeconds]) -> PartSeconds:
    """Return each pass of the member that takes longest for it."""
    known = list(members)
    first = max(known, key=lambda part: part.total.forward_s)
    second = max(known, key=lambda part: part.total.backward_s)
    return PartSeconds(*((a[0], b[1]) for a, b in zip(first, second, strict=True)))


def _sum(part: PartSeconds) -> StageCauses:
    return StageCauses(sum(part.products), sum(part.attention), sum(part.memory))


def _embedding(source: PieceSource, gpu: GpuType, share: TensorShare) -> PartSeconds:
    times = embedding_times(source.workload, gpu, *_sizes(source, share))
    return PartSeconds((0.0, 0.0), (0.0, 0.0), (times.forward_s, times.backward_s))


def _head(source: PieceSource, gpu: GpuType, share: TensorShare) -> PartSeconds:
    width, rows, _, tokens = _sizes(source, share)
    times = head_times(source.workload, gpu, width, rows, None, tokens)
    return _with_product(
        source, gpu, times, head_product(source.workload.model, width, rows, tokens)
    )


def _joining(source: PieceSource, gpu: GpuType, share: TensorShare) -> PartSeconds:
    width, _, _, tokens = _sizes(source, share)
    times = joining_times(source.workload, gpu, width, None, tokens)
    return _with_product(source, gpu, times, joining_product(source.workload.model, width, tokens))


def _with_product(
    source: PieceSource, gpu: GpuType, times: PassTimes, product: Product
) -> PartSeconds:
    """Divide times into a product, which the backward pass has twice, and the rest."""
    product_s = speed_of(source.workload.training, gpu).products_s((product,))
    return PartSeconds(
        (product_s, 2 * product_s),
        (0.0, 0.0),
        (times.forward_s - product_s, times.backward_s - 2 * product_s),
    )


def _sizes(source: PieceSource, share: TensorShare) -> tuple[int, int, None, int]:
    """Return width, rows, the shipped calibration, and tokens."""
    model, training = source.workload.model, source.workload.training
    # As prices do, all members have the first one's tokens.
    tokens = source.members[0][1].num_tokens(model, training)
    width = source.members[0][1].width
    return width, share.rows_as_if_even(model, source.vocab_rows), None, tokens
