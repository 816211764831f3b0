"""A GPT's layers for divided sequences: their attention, and rotary positions token by token."""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn

from megatron_hetero.runtime.model import gpt
from megatron_hetero.runtime.model.attention.rotary import replace_rotary
from megatron_hetero.runtime.model.spec_parts import with_parts
from megatron_hetero.runtime.sequences.attention import DividedAttention
from megatron_hetero.runtime.sequences.own_batch import DividedSequences


def divided_layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
    """Return `runtime.model.gpt.layer_spec` with attention inside divided sequences."""
    return with_parts(
        gpt.layer_spec(model_config, vp_stage), {DotProductAttention: DividedAttention}
    )


class DividedRotaryEmbedding(nn.Module):
    """Megatron's embedding `whole`, with the angles of a rank's own tokens.

    Megatron asks first for the length and then for the angles of one micro-batch.
    """

    def __init__(self, whole: RotaryEmbedding) -> None:
        super().__init__()
        self.whole = whole
        self._positions: Tensor | None = None
        self._angles: Tensor | None = None

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: DividedSequences,
        **named: Any,
    ) -> int:
        """Return the length of the longest sequence; arguments are Megatron's."""
        self._positions = packed_seq_params.positions
        return int(packed_seq_params.max_seqlen_q)

    def forward(self, max_seq_len: int, *given: Any, **named: Any) -> Tensor:
        """Return the angles `[s_r, 1, 1, d]` of the rank's tokens; arguments are Megatron's."""
        # Angles of the longest sequence so far serve all shorter ones.
        if self._angles is None or len(self._angles) < max_seq_len:
            self._angles = self.whole.get_emb(max_seq_len)
        return self._angles.index_select(0, self._positions)


def divided_rotary_hook(model: list[Any]) -> list[Any]:
    """Put `DividedRotaryEmbedding` in the place of every rotary embedding: a `pre_wrap_hook`."""
    replace_rotary(model, DividedRotaryEmbedding)
    return model
