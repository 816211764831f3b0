"""Attention with keys and values of earlier steps, and rotary angles by position.

The tokens of a step, of several sequences, follow one another as one sequence of activations
`[t, 1, h]`; Megatron's layers compute each token alone but in attention, which finds here the keys
and values of the token's own sequence, in blocks. Megatron's own cache keeps one length for a whole
batch, or needs FlashAttention's kernels; this one runs wherever torch does.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from megatron_hetero.lab.serve.batch import BLOCK_TOKENS, Step
from megatron_hetero.runtime.model.attention.rotary import replace_rotary
from megatron_hetero.runtime.parallel.masked_attention import MaskedAttention

_ATTRIBUTE = "hetero_served_step"


class ServedStep:
    """The step that this rank computes: positions of its tokens, and their places in the cache.

    `positions` are `[t]`; `places` has for each segment the slots of the whole sequence so far.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_slots = num_blocks * BLOCK_TOKENS
        self.positions = torch.zeros(0, dtype=torch.int64)
        self.segments: tuple[tuple[int, int], ...] = ()
        self.places: tuple[Tensor, ...] = ()

    def begin(self, step: Step, device: Any) -> None:
        """Take over the next step."""
        self.segments = tuple((s.first, s.stop) for s in step.segments)
        runs = [torch.arange(first, stop) for first, stop in self.segments]
        # A step is filled up to a multiple of the widths; such tokens stand at position 0.
        padding = step.num_tokens - sum(map(len, runs))
        self.positions = torch.cat([*runs, torch.zeros(padding, dtype=torch.int64)]).to(device)
        places = []
        # Slot of each token of the sequence so far: its block's first slot,
        # and the place in the block.
        for segment in step.segments:
            at = torch.arange(segment.stop)
            blocks = torch.tensor(segment.blocks)[at // BLOCK_TOKENS]
            places.append((blocks * BLOCK_TOKENS + at % BLOCK_TOKENS).to(device))
        self.places = tuple(places)


def set_served_step(config: Any, step: ServedStep) -> None:
    """Store the step on a model's configuration, where its attention finds it."""
    setattr(config, _ATTRIBUTE, step)


class CachedAttention(MaskedAttention):
    """Core attention of a step's tokens with the keys and values of their sequences."""

    asked_by = "serving"
    instead = "serve the model with vLLM or SGLang, which have windows"

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._step: ServedStep = getattr(config, _ATTRIBUTE)
        self._held: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Store keys and values, and compute attention of each segment.

        Shapes: queries `[t, 1, heads, d]`, keys and values `[t, 1, groups, d]`; the result
        `[t, 1, heads * d]`, zeros where a token only fills up the step.
        """
        keys, values = self._room(key, value)
        row, found = 0, []
        # Rows of a segment follow those of the one before; its sequence is `places` long.
        for (first, stop), places in zip(self._step.segments, self._step.places, strict=True):
            last = row + stop - first
            keys[places[first:]], values[places[first:]] = key[row:last, 0], value[row:last, 0]
            # Keys and values of the whole sequence, [tokens, 1, groups, d].
            of_sequence = (keys[places].unsqueeze(1), values[places].unsqueeze(1))
            found.append(self.rows(query[row:last], *of_sequence, ((first, stop - first),)))
            row = last
        # Rows that fill up the step.
        width = query.size(2) * value.size(3)
        found.append(query.new_zeros(len(query) - row, 1, width))
        return torch.cat(found)

    def _room(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cache of this layer `[slots, groups, d]`, made at the first step."""
        if self._held is None:
            slots = self._step.num_slots
            self._held = tuple(part.new_zeros(slots, *part.shape[2:]) for part in (key, value))  # type: ignore[assignment]
        assert self._held is not None
        return self._held


class RotaryByPosition(nn.Module):
    """Megatron's rotary embedding `whole`, with the angles of a step's positions."""

    def __init__(self, whole: RotaryEmbedding, step: ServedStep, max_length: int) -> None:
        super().__init__()
        self.whole, self._step, self._max_length = whole, step, max_length
        self._table: tuple[Tensor, ...] | None = None

    def get_rotary_seq_len(self, *given: Any, **named: Any) -> int:
        """Return the length of the longest sequence."""
        return self._max_length

    def forward(self, max_seq_len: int, *given: Any, **named: Any) -> Any:
        """Return the angles `[t, 1, 1, d]` of the step's tokens, and beside them the scale of
        attention where `whole` has one; arguments are Megatron's."""
        # All angles once; a step selects the rows of its positions.
        if self._table is None:
            found = self.whole.get_emb(self._max_length)
            self._table = found if isinstance(found, tuple) else (found,)
        angles, *scale = self._table
        own = angles.index_select(0, self._step.positions.to(angles.device))
        return (own, *scale) if scale else own


def rotary_hook(step: ServedStep, max_length: int) -> Any:
    """Return a `pre_wrap_hook` that gives every rotary embedding the step's positions."""

    def hook(model: list[Any]) -> list[Any]:
        replace_rotary(model, lambda whole: RotaryByPosition(whole, step, max_length))
        return model

    return hook
