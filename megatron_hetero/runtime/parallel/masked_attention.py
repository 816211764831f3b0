"""Attention of local layers with a mask of visible keys in place of Megatron's causal mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.parallel.fused_rows import Run, attend, may_be_fused, positions_of


class MaskedAttention(DotProductAttention):
    """Megatron's core attention, under a mask from the subclass.

    Raises:
        UnsupportedError: the attention is not causal, or looks back through a window; the message
            has `asked_by`, which needs the mask, and `instead`, what else would do.
    """

    asked_by: ClassVar[str]
    instead: ClassVar[str]

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, *args: Any, **kwargs: Any
    ) -> None:
        if attn_mask_type != AttnMaskType.causal or config.window_size is not None:
            raise UnsupportedError(
                f"{self.asked_by} with local layers: only causal attention without --window-size "
                f"is supported. Use --transformer-impl transformer_engine, or {self.instead}."
            )
        # "padding" stands for a mask that is given.
        super().__init__(config, layer_number, AttnMaskType.padding, *args, **kwargs)
        self._is_fused = may_be_fused(self.config)
        # What `--apply-query-key-layer-scaling` divides by here, Megatron's softmax multiplies.
        self._scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)

    def rows(self, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run]) -> Tensor:
        """Compute causal attention of some queries of sequences: by torch's fused kernels where
        the job's flags allow it, else by Megatron's own attention under a mask.

        Args:
            query: shape `[rows, b, heads, d]`.
            key, value: of whole sequences, shape `[tokens, b, groups, d]`.
            runs: positions of the queries, in their order.
        Returns:
            Shape `[rows, b, heads * d]`.
        """
        if self._is_fused:
            return attend(query, key, value, runs, self._scale)
        # [rows, tokens]: a key behind the query's position is hidden.
        positions = positions_of(runs, query.device)
        later = torch.arange(len(key), device=query.device) > positions.unsqueeze(1)
        found: Tensor = super().forward(query, key, value, later[None, None], None)
        return found
