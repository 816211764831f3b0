"""Softmax of unfused attention: scaled, masked, causal; forward and backward.

Source: Transformer Engine, `common/fused_softmax`. A masked score is -10000; of a row that is
masked as a whole all probabilities are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hetero.runtime.transformer_engine.kernels.widths import wide

_MASKED = -10000.0


def scaled_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """Return the softmax of `scale * x` over the last dimension."""
    return torch.softmax(wide(x) * scale, -1).to(x.dtype)


def scaled_softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return the gradient of `x`, from that of the probabilities `y`."""
    gradient, probability = wide(dy), wide(y)
    # The derivative leaves out the part along the probabilities, whose sum is fixed.
    along = (gradient * probability).sum(-1, keepdim=True)
    return (scale * probability * (gradient - along)).to(dy.dtype)


def scaled_masked_softmax_forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the softmax of `scale * x`, [b, h, q, k], without keys where `mask` is nonzero.

    Args:
        x: the scores.
        mask: [b or 1, 1, q, k].
        scale: their factor.
    """
    hidden = mask.bool()
    probability = torch.softmax((wide(x) * scale).masked_fill(hidden, _MASKED), -1)
    return probability.masked_fill(hidden.all(-1, keepdim=True), 0.0).to(x.dtype)


def scaled_aligned_causal_masked_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """Return the softmax of `scale * x`, [..., q, k], causal; the last query sees all keys."""
    queries, keys = x.shape[-2:]
    # Counted from the last query, which sees the last key.
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return torch.softmax((wide(x) * scale).masked_fill(later, float("-inf")), -1).to(x.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_forward = scaled_aligned_causal_masked_softmax_forward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
