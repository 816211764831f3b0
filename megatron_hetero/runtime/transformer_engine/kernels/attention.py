"""Attention of `fused_attn_fwd` and `fused_attn_bwd`, dense and packed, with its log-sums.

What fused attention of the compiled part does otherwise (dropout, biases, learned offsets) is
declined in `get_fused_attn_backend`, where Transformer Engine then takes its unfused attention.

Shapes: q `[s, b, h, d]`, `[b, s, h, d]` or, packed, `[t, h, d]`; keys and values may have fewer
heads. Log-sums are `[b, h, q, 1]`, packed `[t, h, 1]`, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.runtime.transformer_engine.kernels.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Softmax_Type,
)
from megatron_hetero.runtime.transformer_engine.kernels.layouts import (
    AttentionCall,
    attended_parts,
    call_shape,
    statistics_shape,
)
from megatron_hetero.runtime.transformer_engine.kernels.widths import wide


def get_fused_attn_backend(parameters: Any) -> tuple[Any, str]:
    """Return the backend for a `FusedAttentionParams`, or none and the reason."""
    declined = {
        "dropout": parameters.dropout > 0,
        "a bias of scores": parameters.bias_type != NVTE_Bias_Type.NVTE_NO_BIAS,
        "learned offsets": parameters.softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
    }
    for what, asked in declined.items():
        if asked:
            return NVTE_Fused_Attn_Backend.NVTE_No_Backend, f"{what}, on a CPU"
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def _heads_first(tensor: Tensor, place: tuple[Any, ...], num_heads: int) -> Tensor:
    """Return `[h, s, d]` of a sequence, each key's head repeated for all queries of the group."""
    part = wide(tensor[place]).transpose(0, 1)
    return part.repeat_interleave(num_heads // part.shape[0], 0)


def _scores(query: Tensor, key: Tensor, shape: AttentionCall) -> Tensor:
    """Return `[h, q, k]`, -inf where a query does not see a key."""
    scores = query @ key.transpose(-1, -2) * shape.scale
    num_q, num_k = scores.shape[-2:]
    left, right = shape.window
    # A causal mask is a window without keys ahead.
    if shape.is_causal:
        right = 0
    if left < 0 and right < 0:
        return scores
    # The diagonal ends in the last key where the queries are the newest tokens.
    shift = num_k - num_q if shape.bottom_right else 0
    # [q, k]: by how many places a key is ahead of a query.
    ahead = torch.arange(num_k) - torch.arange(num_q)[:, None] - shift
    hidden = torch.zeros(num_q, num_k, dtype=torch.bool)
    if right >= 0:
        hidden |= ahead > right
    if left >= 0:
        hidden |= ahead < -left
    return scores.masked_fill(hidden, float("-inf"))


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    attn_bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: Any,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Any,
    page_table_v: Any,
    s_quantizer: Any,
    o_quantizer: Any,
    attn_bias: Any,
    softmax_offset: Any,
    rng_gen: Any,
    rng_elts_per_thread: int,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
) -> list[Tensor]:
    """Attend; the arguments are those of `cpp_extensions.fused_attn.fused_attn_fwd`, in its order.

    Returns:
        The output as `q`, but with the width of `v`; the log-sums; with `return_max_logit` the
        largest scores, shaped as the log-sums; a random state that nothing drew from.
    """
    # Whatever is given of these asks for something that these kernels do not do.
    given = (attn_bias, softmax_offset, page_table_k, page_table_v, s_quantizer, o_quantizer)
    declined = (dropout, *(thing is not None for thing in given))
    shape = call_shape(
        qkv_layout, attn_scale, attn_mask_type, window_size, bottom_right_diagonal, declined
    )
    # Running sums of the lengths of queries and keys, and both with padding.
    ends = cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded
    # Padding belongs to no sequence: its output stays 0, its log-sum -inf.
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    log_sums = torch.full(statistics_shape(shape, q), float("-inf"), dtype=torch.float32)
    largest = log_sums.clone()
    for piece in attended_parts(shape, q, k, ends):
        # Per sequence, all [h, s, d], in fp32.
        query = _heads_first(q, piece.queries, q.shape[-2])
        scores = _scores(query, _heads_first(k, piece.keys, q.shape[-2]), shape)
        log_sum = torch.logsumexp(scores, -1, keepdim=True)
        probability = torch.exp(scores - _finite(log_sum))
        value = probability @ _heads_first(v, piece.keys, q.shape[-2])
        out[piece.queries] = value.transpose(0, 1).to(out.dtype)
        # Without keys there is no largest score.
        top = scores.amax(-1, keepdim=True) if scores.shape[-1] else log_sum
        # Packed statistics have tokens before heads.
        if shape.name == "thd":
            log_sum, top = log_sum.transpose(0, 1), top.transpose(0, 1)
        log_sums[piece.statistics] = log_sum.float()
        largest[piece.statistics] = top.float()
    random_state = torch.zeros(2, dtype=torch.int64)
    return [out, log_sums, *([largest] if return_max_logit else []), random_state]


def _finite(log_sum: Tensor) -> Tensor:
    """Replace the log-sum of a query without keys, for probabilities of 0."""
    return log_sum.masked_fill(log_sum == float("-inf"), 0.0)


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    attn_bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    fake_dtype: Any,
    aux_ctx_tensors: Sequence[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of q, k and v, and None for those of a bias and of offsets.

    The arguments are those of `cpp_extensions.fused_attn.fused_attn_bwd`, in its order.  Output and
    log-sums are taken as given: under context parallelism they are those of all keys, of which this
    call has a part.
    """
    given = (s_quantizer, dp_quantizer, dqkv_quantizer)
    declined = (dropout, *(thing is not None for thing in given))
    shape = call_shape(
        qkv_layout, attn_scale, attn_mask_type, window_size, bottom_right_diagonal, declined
    )
    ends = cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded
    # The forward pass hands on log-sums first, then a random state.
    log_sums = aux_ctx_tensors[0]
    # One number for each query and head, in whatever shape the forward pass handed it on.
    if log_sums.numel() == q.numel() // q.shape[-1]:
        log_sums = log_sums.reshape(statistics_shape(shape, q))
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (q, k, v))
    num_heads, num_groups = q.shape[-2], k.shape[-2]
    for piece in attended_parts(shape, q, k, ends):
        query = _heads_first(q, piece.queries, num_heads)
        key = _heads_first(k, piece.keys, num_heads)
        value = _heads_first(v, piece.keys, num_heads)
        out, gradient = (_heads_first(t, piece.queries, num_heads) for t in (o, d_o))
        log_sum = log_sums[piece.statistics]
        if shape.name == "thd":
            log_sum = log_sum.transpose(0, 1)
        # Probabilities come again from the log-sums: the forward pass kept nothing of [h, q, k].
        probability = torch.exp(_scores(query, key, shape) - _finite(log_sum))
        # Output times gradient, which the derivative of the softmax subtracts (FlashAttention's D).
        along = (gradient * out).sum(-1, keepdim=True)
        d_scores = probability * (gradient @ value.transpose(-1, -2) - along) * shape.scale
        # Gradients of shared keys and values are sums over the query heads of a group.
        parts = (
            (dq, piece.queries, d_scores @ key),
            (dk, piece.keys, _in_groups(d_scores.transpose(-1, -2) @ query, num_groups)),
            (dv, piece.keys, _in_groups(probability.transpose(-1, -2) @ gradient, num_groups)),
        )
        for whole, place, part in parts:
            whole[place] = part.transpose(0, 1).to(whole.dtype)
    return [dq, dk, dv, None, None]


def _in_groups(gradient: Tensor, num_groups: int) -> Tensor:
    """Sum the gradients `[h, s, d]` of heads that share keys."""
    heads, *rest = gradient.shape
    return gradient.reshape(num_groups, heads // num_groups, *rest).sum(1)
