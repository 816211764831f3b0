"""Attention of local layers under a mask that is made here, where Megatron has its causal one."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_hetero.errors import UnsupportedError


class MaskedAttention(DotProductAttention):
    """Megatron's core attention, to which a subclass gives a mask of its own.

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
