"""Bytes that passes need beside what they keep for backward: working sets, buffer of scores.

Unfused attention is Megatron's `DotProductAttention` with a softmax in torch's own operations: jobs
in fp32 run it, and jobs in 16 bits that have no fused softmax of Apex.
"""

from __future__ import annotations

from megatron_hetero.cost.memory.activations import layer_activation_bytes, score_bytes
from megatron_hetero.cost.memory.mlp import mlp_activation_bytes
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.model.spec import ModelSpec, TrainingSpec

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

    The greater of two moments: in the MLP, gradients of its widest activations; in unfused
    attention, tensors of scores, when the layer's own scores and its MLP's activations are already
    let go.  All that the layer recomputes comes on top.
    """
    tokens, element = share.num_tokens(model, training), training.element_bytes
    # Moment 1: the MLP.
    widest = max(share.mlp_columns, share.shared_columns) * (3 if model.gated_mlp else 2)
    working = tokens * element * (widest + 2 * model.hidden_size)
    # Moment 2: the mask of unfused attention; scores are kept unless attention is recomputed.
    if scores := score_bytes(model, training, share, flash):
        let_go = mlp_activation_bytes(model, training, share)
        let_go += scores * 2 + scores // element if training.attention_dropout else scores
        working = max(working, _SCORES_IN_BACKWARD * scores - let_go)
    # What the layer computes again before its backward.
    if training.recompute != "none":
        working += layer_activation_bytes(model, training, share, flash, "none")
        working -= layer_activation_bytes(model, training, share, flash, training.recompute)
    return working
