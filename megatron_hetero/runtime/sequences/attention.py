"""Attention inside sequences that the ranks of a group divide, several packed one after the other.

As in `runtime.parallel.context_attention` each rank gathers keys and values and computes the rows
of its own queries; here of each sequence by itself, so that a pack of short ones costs their own
pairs of tokens, and with the group of the micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_hetero.runtime.parallel.context_attention import gathered_pieces
from megatron_hetero.runtime.parallel.masked_attention import MaskedAttention
from megatron_hetero.runtime.sequences.own_batch import DividedSequences


class DividedAttention(MaskedAttention):
    """Core attention of a rank's own queries, sequence by sequence."""

    asked_by = "--hetero-sequences"
    instead = "a plan without flexible sequences"

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
        """Compute attention.

        Shapes: queries `[s_r, 1, heads, d]`, keys and values `[s_r, 1, groups, d]`, where s_r are
        the rank's own tokens of all sequences; the result `[s_r, 1, heads * d]`.
        """
        own: DividedSequences = packed_seq_params
        if own.cp_group.size() > 1:
            # Together: one message instead of two.
            both = torch.cat([key, value], dim=-1)
            both = gathered_pieces(both, own.most_tokens, own.cp_group)
            key, value = both.split([key.size(-1), value.size(-1)], dim=-1)
        found = []
        for q, order in enumerate(own.orders):
            mine = slice(own.edges[q], own.edges[q + 1])
            if mine.start == mine.stop:
                continue
            later = torch.arange(len(order), device=order.device) > own.positions[mine, None]
            found.append(
                super().forward(
                    query[mine],
                    key.index_select(0, order),
                    value.index_select(0, order),
                    later[None, None],
                    None,
                    attention_bias,
                )
            )
        if own.edges[-1] < len(query):
            # The filling tokens.  The gather's backward pass is a collective of all members.
            found.append(query[own.edges[-1] :].flatten(2) + 0 * (key.sum() + value.sum()))
        return torch.cat(found)
