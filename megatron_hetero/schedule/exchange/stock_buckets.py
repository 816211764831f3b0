"""The buckets in which stock Megatron exchanges a stage's gradients (`DistributedDataParallel`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from megatron_hetero.cost.parameters import (
    embedding_params,
    further_matrix_params,
    further_params,
    layer_params,
    matrix_params,
    routed_matrix_params,
    routed_params,
    stage_params,
)
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import EMBEDDING, StageBucket, StageId, layer_tensors
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec


def stock_bucket_elements(num_replicas: int) -> int:
    """Return Megatron's default of `--ddp-bucket-size`, elements of one rank."""
    return max(40_000_000, 1_000_000 * num_replicas)


class StockBuckets:
    """Buffers of the stages of equal replicas, divided into buckets.

    Args:
        vocab_rows: of the word embedding, padded.
        chunk_layers: layers of the model chunks of interleaved stages; each chunk is a model of its
            own to stock Megatron, with its own buffers.
    """

    def __init__(
        self,
        placement: Placement,
        model: ModelSpec,
        training: TrainingSpec,
        vocab_rows: int,
        chunk_layers: Mapping[StageId, Sequence[int]],
    ) -> None:
        self._replicas = placement.replicas
        self._model = model
        self._overlaps = training.overlap_grad_reduce
        self._has_fp8_weights = training.has_fp8_weights
        self._vocab_rows = vocab_rows
        self._words = vocab_rows * model.hidden_size
        self._chunk_layers = chunk_layers
        self._deals_experts = replicas_deal_experts(placement)
        self._divides_tied = (
            training.use_distributed_optimizer
            and model.copies_words
            and len(self._replicas[0].stages) > 1
        )
        """Whether an embedding on two stages has a bucket of its own
        (`DistributedOptimizer._compute_per_buffer_param_layout`)."""

    def __iter__(self) -> Iterator[tuple[StageBucket, int | None]]:
        """Yield (bucket, chunk) in the order of exchange; chunk is None on a stage with a single
        chunk.

        One for each chunk of a stage, the first one first (`finalize_model_grads`), or where they
        overlap the last one first.  On a first stage that overlaps, the buckets of the first chunk
        are full as soon as they have `--ddp-bucket-size` elements.
        """
        replicas, words = self._replicas, self._words
        share = even_share(self._model, 1)
        # All replicas are alike in stock Megatron, so the first one stands for all.
        for s, stage in enumerate(replicas[0].stages):
            holders = tuple((r, s) for r in range(len(replicas)))
            is_first, is_last = s == 0, s == len(replicas[0].stages) - 1
            # Backward passes complete the last chunk first.
            layers = list(enumerate(self._chunk_layers.get((0, s)) or [stage.num_layers]))
            for chunk, num_layers in reversed(layers) if self._overlaps else layers:
                number = chunk if len(layers) > 1 else None
                first, last = is_first and chunk == 0, is_last and chunk + 1 == len(layers)
                # Parameters of the chunk in the dense buffer; dealt-out experts have a buffer of
                # their own.
                params = stage_params(self._model, share, num_layers, first, last, self._vocab_rows)
                if self._deals_experts:
                    params -= num_layers * routed_params(self._model)
                # By default one bucket; the first chunk's are cut by size where exchanges overlap.
                sizes = [(params, EMBEDDING)]
                full = None
                if first and self._overlaps:
                    full = stock_bucket_elements(len(replicas)) * stage.width
                if self._has_fp8_weights:
                    for bucket in self._with_fp8_weights(full, params, num_layers, last):
                        yield replace(bucket, holders=holders), number
                    continue
                if full is not None:
                    sizes = list(self._overlapped(full, num_layers, last))
                # Chunks behind the first one exchange all buckets at once.
                elif self._divides_tied and (first or last) and chunk == 0:
                    sizes = [(params - words, EMBEDDING), (words, EMBEDDING)]
                    sizes = sizes if first else sizes[::-1]
                for size, layer in sizes:
                    yield StageBucket(holders, size, layer), number

    def _with_fp8_weights(
        self, full: int | None, params: int, num_layers: int, is_last: bool
    ) -> Iterator[StageBucket]:
        """Yield the buckets, without holders, of a chunk whose layers' matrices are kept in fp8:
        these have a buffer of their own, with whose last bucket all others are exchanged
        (`partition_buckets`).

        Args:
            full: elements of matrices that fill a bucket; None makes one bucket.
            params: of all buckets.
        """
        matrices = list(self._matrices(num_layers, is_last))
        left = sum(size for _, size in matrices)
        size = 0
        for layer, matrix in matrices if full is not None else ():
            size += matrix
            # The last bucket, full or not, has all else too.
            if full is not None and full <= size < left:
                yield StageBucket((), size, layer, num_in_matrices=size)
                params, left, size = params - size, left - size, 0
        yield StageBucket((), params, EMBEDDING, num_in_matrices=left)

    def _matrices(self, num_layers: int, is_last: bool) -> Iterator[tuple[int, int]]:
        """Yield (layer, elements) of the matrices of layers in the order of the backward pass."""
        share = even_share(self._model, 1)
        if is_last and self._model.mtp_num_layers:
            yield num_layers, further_matrix_params(self._model, share)
        # The last tensor of a layer has its norms and biases as well.
        *first, last = self._layer_tensors
        last -= layer_params(self._model, share) - matrix_params(self._model, share)
        for layer in reversed(range(num_layers)):
            yield from ((layer, size) for size in (*first, last))

    def _overlapped(self, full: int, num_layers: int, is_last: bool) -> Iterator[tuple[int, int]]:
        """Yield (parameters, lowest layer) of the buckets of a first stage, in the order of its
        backward pass."""
        # Elements since the last bucket, over the whole tensor-parallel group.
        size = 0
        for layer, tensor in self._tensors_before_words(num_layers, is_last):
            size += tensor
            if size >= full:
                yield size, layer
                size = 0
        # The word embedding ends the backward pass, and with it the last bucket.
        if size and self._divides_tied:
            yield size, EMBEDDING
            size = 0
        yield size + self._words, EMBEDDING

    def _tensors_before_words(self, num_layers: int, is_last: bool) -> Iterator[tuple[int, int]]:
        """Yield (layer, parameters) of a first stage in the order of its backward pass, all but the
        word embedding, which is the last of them."""
        if is_last and not self._model.tied_embeddings:
            yield num_layers, self._words
        if is_last and self._model.mtp_num_layers:
            yield num_layers, further_params(self._model, even_share(self._model, 1))
        for layer in reversed(range(num_layers)):
            yield from ((layer, tensor) for tensor in self._layer_tensors)
        positions = embedding_params(self._model, 1, 0)
        if positions:
            yield EMBEDDING, positions

    @cached_property
    def _layer_tensors(self) -> tuple[int, ...]:
        """The tensors of a layer in the dense buffers, as of `layer_tensors`: dealt-out experts
        have a buffer of their own."""
        tensors, model = layer_tensors(self._model), self._model
        if self._deals_experts:
            own = model.moe_ffn_hidden_size * model.hidden_size
            num_matrices = model.num_experts * (3 if model.gated_mlp else 2)
            tensors = tensors[num_matrices:] if tensors[0] == own else tensors
        return tensors

    def of_experts(self) -> Iterator[tuple[StageBucket, tuple[PlacedStage, ...]]]:
        """Yield each buffer of experts dealt out over replicas, with the groups of ranks that hold
        the same experts."""
        if not self._deals_experts:
            return
        replicas = self._replicas
        for s, stage in enumerate(replicas[0].stages):
            if stage.experts is None:
                continue
            # An expert-parallel group of `ranks` GPUs covers one stage of `together` replicas.
            size, width = stage.experts.sizes
            ranks, own = size * width, len(stage.devices)
            params = stage.num_layers * routed_params(self._model)
            in_matrices = stage.num_layers * routed_matrix_params(self._model)
            together = max(1, ranks // own)
            # Replicas at the same place of their groups hold the same experts: a ring joins these.
            for turn in range(together):
                members = range(turn, len(replicas), together)
                stages = [replicas[r].stages[s] for r in members]
                # If a group is narrower than a stage, the stage holds every expert several times.
                step = min(ranks, own)
                groups = tuple(
                    PlacedStage(each.devices[first : first + step], 1)
                    for each in stages
                    for first in range(0, own, step)
                )
                if len(groups) < 2:
                    continue
                holders = tuple((r, s) for r in members)
                of_turn = StageBucket(
                    holders,
                    params // together,
                    EMBEDDING,
                    num_in_matrices=in_matrices // together,
                )
                if all(len({device.node for device in g.devices}) == 1 for g in groups):
                    yield of_turn, groups
                    continue
                # Ranks on several nodes do not work beside the first one: each place of the groups
                # has a ring of its own.
                for place in range(step):
                    alone = tuple(PlacedStage((g.devices[place],), 1) for g in groups)
                    of_place = replace(
                        of_turn,
                        num_params=of_turn.num_params // step,
                        num_in_matrices=of_turn.num_in_matrices // step,
                    )
                    yield of_place, alone


def replicas_deal_experts(placement: Placement) -> bool:
    """Return whether experts are dealt out over replicas."""
    return any(s.experts is not None for r in placement.replicas for s in r.stages)
