"""Attention inside sequences divided by the ranks of a group, several packed in a row.

A rank either gathers keys and values and computes the rows of its own queries, as in
`runtime.parallel.context_attention`; or ranks exchange heads (`head_exchange`), and each computes
some heads for the tokens of several.  Both go sequence by sequence, so that a pack of short ones
costs their own pairs of tokens, and with the group of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_hetero.runtime.parallel.context_attention import gathered_pieces
from megatron_hetero.runtime.parallel.fused_rows import Run
from megatron_hetero.runtime.parallel.masked_attention import MaskedAttention
from megatron_hetero.runtime.sequences.head_exchange import HeadDomain, to_heads, to_tokens
from megatron_hetero.runtime.sequences.own_batch import DividedSequences


class DividedAttention(MaskedAttention):
    """Core attention of a rank's own tokens, sequence by sequence."""

    scale_mask_softmax: nn.Module
    asked_by = "--hetero-sequences"
    instead = "a plan without flexible sequences"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._softmax = _SoftmaxOfHeads(self.scale_mask_softmax)
        self.scale_mask_softmax = self._softmax

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
        # Ulysses: ranks exchange heads, and each attends to whole sequences.
        own: DividedSequences = packed_seq_params
        if own.heads is not None:
            return self._by_heads(query, key, value, own, own.heads)
        # Otherwise gather keys and values of the group; each rank computes its own queries.
        self._softmax.heads = slice(None)
        if own.cp_group.size() > 1:
            # Together: one message instead of two.
            both = torch.cat([key, value], dim=-1)
            both = gathered_pieces(both, own.most_tokens, own.cp_group)
            key, value = both.split([key.size(-1), value.size(-1)], dim=-1)
        # Sequence by sequence, so that a pack costs only its own pairs of tokens.
        found = []
        for q, order in enumerate(own.orders):
            mine = slice(own.edges[q], own.edges[q + 1])
            if mine.start < mine.stop:
                found.append(self._of_one(query[mine], key, value, order, own.runs[q]))
        # Filling tokens behind the sequences attend to nothing that counts.
        if own.edges[-1] < len(query):
            found.append(_filling(query[own.edges[-1] :], key, value))
        return torch.cat(found)

    def _by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, own: DividedSequences, heads: HeadDomain
    ) -> Tensor:
        """Compute attention of a part of the heads for the tokens of the rank's domain."""
        count = own.edges[-1]
        queries, keys, values = to_heads(
            query[:count], key[:count], value[:count], heads, own.cp_group
        )
        self._softmax.heads = heads.heads_of(heads.member, query.size(2))
        # What a rank without tokens in its domain gets is used too, in the place of nothing.
        found = [queries[:0].flatten(2)]
        for order, rows, runs in zip(own.orders, heads.rows, heads.runs, strict=True):
            if len(rows):
                found.append(self._of_one(queries.index_select(0, rows), keys, values, order, runs))
        # Back into the order of the domain's tokens, member by member.
        by_sequence = torch.argsort(torch.cat(heads.rows))
        context = to_tokens(torch.cat(found).index_select(0, by_sequence), heads, own.cp_group)
        if count == len(query):
            return context
        return torch.cat([context, _filling(query[count:], keys, values, context)])

    def _of_one(
        self, query: Tensor, key: Tensor, value: Tensor, order: Tensor, runs: Sequence[Run]
    ) -> Tensor:
        """Compute attention of queries at some positions of one sequence.

        Args:
            query: shape `[tokens, 1, heads, d]`.
            key, value: of all sequences.
            order: places of the sequence's keys in them.
            runs: positions of the queries.
        """
        key, value = key.index_select(0, order), value.index_select(0, order)
        # Megatron's own width of the result; a part of the heads is as much narrower.
        self.hidden_size_per_partition = query.size(2) * value.size(3)
        return self.rows(query, key, value, runs)


class _SoftmaxOfHeads(nn.Module):
    """Megatron's softmax for the scores of some heads."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole, self.heads = whole, slice(None)

    def forward(self, scores: Tensor, mask: Tensor | None, offset: Tensor | None = None) -> Tensor:
        """Return probabilities; arguments are Megatron's, `offset` of all heads of the rank."""
        found: Tensor = self.whole(scores, mask, None if offset is None else offset[self.heads])
        return found


def _filling(query: Tensor, *received: Tensor) -> Tensor:
    """Return the result of filling tokens; the backward pass of an exchange is a collective of all
    members, whether they have tokens or not."""
    return query.flatten(2) + 0 * sum(part.sum() for part in received)
