"""Bytes that passes need beside what they keep for backward: working sets, buffer of scores.

Unfused attention is Megatron's `DotProductAttention` with a softmax in torch's own operations: jobs
in fp32 run it, and jobs in 16 bits that have no fused softmax of Apex.
"""

from __future__ import annotations

from megatron_hetero.cost.memory.activations import (
    layer_activation_bytes,
    part_activation_bytes,
    score_bytes,
)
from megatron_hetero.cost.memory.mlp import mlp_activation_bytes
from megatron_hetero.cost.parameters import attention_sizes
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.model.recompute import recomputed
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec

_SCORES_IN_BACKWARD = 4
"""Number of tensors as large as the scores that live at once in the backward pass of the mask.

`attention_mask_func` fills a view of the scores in place, so autograd's `CopySlices` holds the
gradient that came in, a copy of all of it, a copy of the view's, and what `masked_fill` makes of
that copy.
"""


_OVERLAP_BUFFERS, _OVERLAP_BUFFERS_IN_FP8 = 12, 8
"""Buffers for exchanges under products, and how many of them are in fp8 where products are
(`initialize_ub` in transformer_engine/pytorch/module/base.py makes all of them, used or not)."""


def overlap_buffer_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> int:
    """Return the buffers of `--tp-comm-overlap`, outside of PyTorch's allocator: each holds the
    activation of a micro-batch for the whole group."""
    if not training.tp_comm_overlap or share.width == 1:
        return 0
    narrow = _OVERLAP_BUFFERS_IN_FP8 if training.fp8 else 0
    # Buffers hold the gathered activation of the group; those in fp8 have one byte an element.
    elements = share.num_tokens(model, training) * model.hidden_size
    return elements * (narrow + (_OVERLAP_BUFFERS - narrow) * training.element_bytes)


def attention_buffer_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool
) -> int:
    """Return the bytes of the buffer that unfused attention computes its scores in.

    All layers use one buffer, which stays for good (`matmul_input_buffer`, from Megatron's global
    memory buffer); with sequence parallelism it holds the gathered activations too, which are
    smaller.
    """
    return score_bytes(model, training, share, flash)


def largest_tensor_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool, vocab_rows: int
) -> int:
    """Return the bytes of the largest tensor that a stage's passes make and release: what the first
    product of the MLP gives, attention's scores, or the loss's logits in fp32.

    Args:
        model, training, share: the job, and the device's part of it.
        flash: attention is fused.
        vocab_rows: rows of the padded vocabulary of a stage with the head, else 0.
    """
    # What the first product of the MLP or of the experts gives; a gated one gives two halves.
    tokens, element = share.num_tokens(model, training), training.element_bytes
    rows = share.routed_tokens(model, training) if model.num_experts else tokens
    wide = (2 if model.gated_mlp else 1) * max(
        rows * share.mlp_columns, tokens * share.shared_columns
    )
    # Only a stage with the head has logits; but for Transformer Engine's the loss takes them in
    # fp32.
    logits = tokens * (vocab_rows // share.width) * (element if training.fused_loss == "te" else 4)
    scores = score_bytes(model, training, share, flash)
    return max(element * max(int(wide), tokens * model.hidden_size), scores, logits)


def working_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool) -> int:
    """Estimate the working set of one layer's backward beyond all activations that the stage keeps.

    The greatest of some moments: in the MLP or the experts, gradients of its widest activations; in
    unfused attention, tensors of scores, when the layer's own scores and its MLP's activations are
    already let go; with gradients that lie apart, those of all experts that are one call.  What is
    recomputed by then comes on top: all of the layer, or the part's own modules.
    """
    tokens, element = share.num_tokens(model, training), training.element_bytes
    of_attention, of_mlp = _recomputed_bytes(model, training, share, flash)
    # Moment 1: the MLP, or experts, which have a row for each token that comes to them; all of them
    # are at work, or one.
    rows = at_work = float(tokens)
    if model.num_experts:
        rows = at_work = share.routed_tokens(model, training)
        at_work /= 1 if training.grouped_experts else share.num_experts(model)
    wide = max(at_work * share.mlp_columns, tokens * share.shared_columns)
    wide *= 3 if model.gated_mlp else 2
    working = int(element * (wide + 2 * max(rows, tokens) * model.hidden_size))
    if training.unfused_gradients and training.grouped_experts:
        working = max(working, _experts_gradients_bytes(model, training, share))
    working += of_mlp
    # Moment 2: attention, whose scores are kept unless they are recomputed.
    in_attention = _gathered_keys_bytes(model, training, share) if flash else 0
    if scores := score_bytes(model, training, share, flash):
        again = frozenset() if training.recompute == "full" else recomputed(training)
        let_go = mlp_activation_bytes(model, training, share, again)
        let_go += scores * 2 + scores // element if training.attention_dropout else scores
        in_attention = _SCORES_IN_BACKWARD * scores - let_go
    return max(working, in_attention + of_attention)


def _gathered_keys_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> int:
    """Return what Transformer Engine's attention takes backward for gathered keys and values, their
    gradients, and what its two calls give of these, beyond the MLP's activations, which are let go
    (`AttnFuncWithCPAndKVAllGather.backward`, 2.20)."""
    parts = share.context_parallel
    if parts == 1 or share.context_shares is not None or training.cp_comm_type != "all_gather":
        return 0
    query, value = attention_sizes(model, share)
    pair = (query if model.kv_lora_rank else value) + value
    elements = share.num_tokens(model, training) * pair * (3 * parts + 0.5)
    again = frozenset() if training.recompute == "full" else recomputed(training)
    let_go = mlp_activation_bytes(model, training, share, again)
    return max(0, int(elements * training.element_bytes) - let_go)


def _recomputed_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool
) -> tuple[int, int]:
    """Return what has been computed again, and is not let go yet, in the backward pass of attention
    and of the MLP."""
    if training.recompute == "none":
        return 0, 0
    if training.recompute == "full":
        given = model, training, share, flash
        whole = layer_activation_bytes(*given, "none") - layer_activation_bytes(*given, "full")
        return whole, whole
    nothing: frozenset[str] = frozenset()
    kept, still_kept = (
        part_activation_bytes(model, training, share, flash, again)
        for again in (nothing, recomputed(training))
    )
    return kept[0] - still_kept[0], kept[1] - still_kept[1]


def _experts_gradients_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare
) -> int:
    """Return what the gradients of all experts' first matrices take, which one call makes before
    any of them is added, beside the gradients of its input and output, when what the activation and
    the second product kept is let go (`_GroupedLinear.backward`, Transformer Engine 2.20)."""
    first = share.mlp_columns * (2 if model.gated_mlp else 1)
    rows = share.routed_tokens(model, training)
    let_go = rows * (first * training.element_bytes)
    let_go += rows * share.mlp_columns * training.product_input_bytes
    weights = share.num_experts(model) * model.hidden_size * first
    return int((weights + rows * (first + model.hidden_size)) * training.element_bytes - let_go)
