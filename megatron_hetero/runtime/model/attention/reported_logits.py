"""Largest attention logit of each head, as Transformer Engine's attention reports it.

`--qk-clip` and `--log-max-attention-logit` read it off each layer's core attention; Megatron's
local attention has none.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention


class ReportingAttention(DotProductAttention):
    """Megatron's local core attention, with `current_max_attn_logits`.

    That is `[heads of this rank]`: the largest scaled and masked logit since it was last read.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.current_max_attn_logits: torch.Tensor | None = None
        # Megatron's mask function is the last to see every score before the softmax.
        softmax = self.scale_mask_softmax
        self._mask = softmax.mask_func
        softmax.mask_func = self._report
        # The fused kernel masks inside, where nothing can be read.
        softmax.scaled_masked_softmax_fusion = False

    def _report(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Mask the scores `[b, heads, s, s]`, and keep each head's largest."""
        masked: torch.Tensor = self._mask(scores, mask)
        largest = masked.detach().amax(dim=(0, 2, 3)).float()
        before = self.current_max_attn_logits
        self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)
        return masked
