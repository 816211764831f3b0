"""Rotary positions of a rank whose share of every sequence is unlike the others'.

Megatron's rotary embedding takes a rank's tokens times the number of context-parallel ranks for the
length of the sequence, and cuts equal chunks of its angles.  Here it is asked for the angles of the
whole sequence, of which the rank's own are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import nn

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.parallel.context_place import ContextPlace

_NAME = "rotary_pos_emb"


class OwnRotaryEmbedding(nn.Module):
    """Megatron's embedding `whole`, with the angles of a rank's own tokens."""

    def __init__(self, whole: RotaryEmbedding, place: ContextPlace) -> None:
        super().__init__()
        self.whole, self.place = whole, place
        self._own: Any = None

    def get_rotary_seq_len(self, *given: Any, **named: Any) -> int:
        """Return the length of the whole sequence."""
        return self.place.seq_length

    def forward(self, max_seq_len: int, *given: Any, **named: Any) -> Any:
        """Return the angles `[s_r, 1, 1, d]` of the rank's tokens, with the scale of attention if
        `whole` has a scale; arguments are Megatron's.

        Raises:
            UnsupportedError: the sequence has another length.
        """
        if max_seq_len != self.place.seq_length:
            raise UnsupportedError(
                f"unlike shares of a sequence of {self.place.seq_length} tokens, and one of "
                f"{max_seq_len}: only sequences of --seq-length are divided by shares. Give equal "
                "shares (cp without shares)."
            )
        # A rank's positions never change, so its angles are taken once.
        if self._own is None:
            found = self.whole.get_emb(max_seq_len)
            angles, *scale = found if isinstance(found, tuple) else (found,)
            own = angles.index_select(0, self.place.positions(angles.device))
            self._own = (own, *scale) if scale else own
        return self._own


def own_rotary_hook(place: ContextPlace) -> Callable[[list[Any]], list[Any]]:
    """Return a `pre_wrap_hook` that puts `OwnRotaryEmbedding` in the place of every rotary
    embedding of the model."""

    def hook(model: list[Any]) -> list[Any]:
        replace_rotary(model, lambda whole: OwnRotaryEmbedding(whole, place))
        return model

    return hook


def replace_rotary(model: list[Any], substitute: Callable[[RotaryEmbedding], nn.Module]) -> None:
    """Put a substitute in the place of every rotary embedding of a model."""
    for chunk in model:
        for module in list(chunk.modules()):
            whole = getattr(module, _NAME, None)
            if isinstance(whole, RotaryEmbedding):
                setattr(module, _NAME, substitute(whole))
