"""Bytes of Megatron's allocations on a device of a stage, part by part.

Weights, gradients and optimizer states follow the parameter shards (`cost.parameters`),
activations the micro-batches in flight (`cost.memory.activations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import add

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.memory.activations import (
    layer_activation_bytes,
    mask_bytes,
    own_mask_bytes,
)
from megatron_hetero.cost.memory.ends import (
    embedding_activation_bytes,
    further_activation_bytes,
    head_activation_bytes,
)
from megatron_hetero.cost.memory.libraries import KeptFree
from megatron_hetero.cost.memory.stage import StageMemory, of_kinds, part_of
from megatron_hetero.cost.memory.states import EVERY_DEVICE, StateHolders, state_bytes
from megatron_hetero.cost.memory.working import (
    attention_buffer_bytes,
    largest_tensor_bytes,
    overlap_buffer_bytes,
    working_bytes,
)
from megatron_hetero.cost.parameters import (
    expert_params,
    layer_params,
    matrix_params,
    stage_params,
    word_params,
)
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec


def _fp8_bytes(training: TrainingSpec, gpu: GpuType) -> int:
    """Return the bytes in fp8 of a weight in a matrix of a layer: Transformer Engine keeps it from
    one micro-batch to the next, and transposed as well, or cast by columns with scales of blocks.
    Blackwell's products with one scale need no transpose
    (`is_non_tn_fp8_gemm_supported`, 2.20: from 10.0 on, but for 12.x)."""
    if not training.fp8:
        return 0
    capability = gpu.capability or 0.0
    is_either_way = 10 <= capability < 12 or capability >= 13
    return 1 if is_either_way and not training.has_block_scales else 2


def kept_sends(launch_counts: Sequence[int]) -> list[int]:
    """Return, by stage, the tensors kept by our runtime for the stage's neighbours.

    A sent tensor is kept until as many later ones are sent as its sender launches ahead
    (`runtime.parallel.boundary`).  Receives are posted ahead (`schedule.orders.delivery`): of each
    neighbour one more than the launch counts differ; `stage_memory` counts that one itself.
    """
    # Shape [stage + 1]: entry i is the boundary before stage i; beyond both ends there is none.
    kept = [0, *[before + max(before - after, 0) for before, after in pairwise(launch_counts)], 0]
    return list(map(add, kept, kept[1:]))


def stage_memory(
    workload: Workload,
    gpu: GpuType,
    share: TensorShare,
    *,
    first: bool,
    last: bool,
    num_in_flight: int,
    vocab_rows: int,
    kept_free: KeptFree,
    num_sends_kept: int | None = None,
    holders: StateHolders = EVERY_DEVICE,
) -> StageMemory:
    """Compute the memory of a stage's device with `num_in_flight` micro-batches kept for backward.

    Args:
        gpu: the device's type, which decides whether attention is fused.
        share: its part of the tensor-parallel group.
        first, last: whether the stage holds the embedding, the head.
        num_in_flight: micro-batches kept for backward at the peak.
        vocab_rows: rows of the padded vocabulary.
        kept_free: memory that holds no tensors of Megatron's.
        num_sends_kept: tensors kept because they may still be under way to a neighbour; None is one
            for each neighbour, as in stock Megatron.
        holders: devices that share the distributed optimizer's states.
    """
    model, training = workload.model, workload.training
    # A model with several kinds of layers has one memory for each kind.
    if model.kinds:
        kinds = tuple(
            stage_memory(
                replace(workload, model=kind),
                gpu,
                share.of_kind(i),
                first=first,
                last=last,
                num_in_flight=num_in_flight,
                vocab_rows=vocab_rows,
                kept_free=kept_free,
                num_sends_kept=num_sends_kept,
                holders=holders,
            )
            for i, kind in enumerate(model.kinds)
        )
        return of_kinds(model, kinds)
    # With unlike shares: the vocabulary of which an even share is this member's rows.
    width = share.width
    vocab_rows = share.rows_as_if_even(model, vocab_rows)
    element = training.element_bytes
    states = state_bytes(training)
    # The GPU decides what is kept: unfused attention stores its scores.
    flash = uses_flash_attention(model, training, gpu)
    tokens = share.num_tokens(model, training)
    # Elements at a boundary, and the tensors kept there for neighbours.
    boundary = share.own_tokens(model, training) * model.hidden_size * training.residual_bytes
    num_hops = (not first) + (not last)
    num_sends_kept = num_hops if num_sends_kept is None else num_sends_kept
    # Parameters outside of layers, by end: a tied embedding is counted by itself, for its holders.
    first_params = stage_params(model, share, 0, first, False, vocab_rows)
    base_params = stage_params(model, share, 0, first, last, vocab_rows)
    last_params = base_params - first_params
    tied_params = 0
    if model.tied_embeddings and (first or last):
        tied_params = word_params(model, width, vocab_rows)
        first_params -= tied_params if first else 0
        last_params -= 0 if first else tied_params
    embedding_holders = holders.embedding or holders.layers
    head_holders = holders.head or holders.layers
    layer = layer_params(model, share)
    # What a micro-batch keeps outside of layers.
    kept_once = 0
    if first or last:
        kept_once += mask_bytes(model, training, share, flash)
    if first:
        kept_once += embedding_activation_bytes(model, training, share)
    logits_bytes = 0
    if last:
        kept_once += head_activation_bytes(model, training, share, vocab_rows)
        kept_once += further_activation_bytes(model, training, share, vocab_rows, flash)
        # Logits in the job's own precision, beside what the loss keeps of them in fp32.
        logits_bytes = tokens * (vocab_rows // width) * (element if element < 4 else 0)

    def of_ends(state: int) -> int:
        """Return the bytes of states of embedding and head, so many for each parameter."""
        tied = part_of(tied_params * state, holders.tied_embedding)
        embedding = part_of(first_params * state, embedding_holders)
        return tied + embedding + part_of(last_params * state, head_holders)

    def of_layer(state: int) -> int:
        if not training.use_distributed_optimizer:
            return layer * state
        return _layer_states_bytes(model, share, layer, holders, state)

    # Of weights kept in fp8 the first byte is the weight itself, the others are copies of it; there
    # is none in 16 bits.  Layers that predict further tokens count as in 16 bits.
    in_fp8 = matrix_params(model, share) if training.has_fp8_weights else 0
    copies = layer * _fp8_bytes(training, gpu)
    if training.has_fp8_weights:
        copies = in_fp8 * (_fp8_bytes(training, gpu) - 1)
    # Outside of layers, then for each layer.
    base = {
        "weights": base_params * states.weight,
        "gradients": base_params * states.gradient,
        "optimizer": of_ends(states.optimizer),
        "activations": num_in_flight * kept_once,
        "buffers": (num_hops + num_sends_kept) * boundary
        + max(working_bytes(model, training, share, flash), logits_bytes)
        + attention_buffer_bytes(model, training, share, flash),
        "libraries": kept_free.libraries + overlap_buffer_bytes(model, training, share),
        "reserve": kept_free.reserve_beside(
            largest_tensor_bytes(model, training, share, flash, vocab_rows if last else 0)
        ),
    }
    # A stage in the middle has no batch, so each layer makes its mask itself.
    kept = layer_activation_bytes(model, training, share, flash, training.recompute)
    if not (first or last):
        kept += own_mask_bytes(model, training, share, flash)
    per_layer = {
        "weights": layer * states.weight - in_fp8 * (states.weight - 1),
        "gradients": layer * states.gradient,
        "optimizer": of_layer(states.optimizer),
        "activations": num_in_flight * kept,
        "buffers": copies,
        "libraries": 0,
        "reserve": 0,
    }
    return StageMemory(
        base,
        per_layer,
        gpu.memory_bytes,
        update_base_bytes=of_ends(states.update),
        update_layer_bytes=of_layer(states.update),
    )


def _layer_states_bytes(
    model: ModelSpec, share: TensorShare, num_params: int, holders: StateHolders, state: int
) -> int:
    """Return the bytes of a layer's divided optimizer states; experts that are dealt out over
    replicas have as many holders as there are groups of them.

    Args:
        num_params: of the layer on this device.
        holders: that divide the states.
        state: bytes of a parameter.
    """
    # Layers without experts over replicas have one set of holders for all their states.
    num_holders, own_holders = holders.layers, holders.experts
    if not (share.expert_ranks or own_holders):
        return part_of(num_params * state, num_holders)
    experts = expert_params(model, share)
    # The ranks of all holders, `num_holders` times the width, form groups of `expert_ranks` each.
    if own_holders is None:
        own_holders = max(1.0, num_holders * share.width / share.expert_ranks)
    rest = part_of((num_params - experts) * state, num_holders)
    return rest + part_of(experts * state, own_holders)
