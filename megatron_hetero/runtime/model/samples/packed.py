"""Sequences packed of documents, with each document trained as if alone.

`--sft` packs conversations, `--dataloader-inter-document-masking` has the documents that a sample
happens to hold. A batch says where they begin (`cu_seqlens`); attention stays inside a document,
rotary positions count from its start. Every stage needs the boundaries, so on a plan every stage
reads the batch. As in Megatron the sequences of a micro-batch follow one another in one.

Transformer Engine has attention over packed sequences; Megatron's local layers refuse them, so here
is one.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.parallel.masked_attention import MaskedAttention


def packed_parameters(batch: dict[str, Tensor | None], seq_length: int) -> PackedSeqParams:
    """Describe a batch joined into a single sequence by `flatten_batch_for_packed_sequences`.

    Args:
        batch: with `cu_seqlens` [1, documents + 1] and `max_seqlen` [1].
        seq_length: tokens of each sequence that was put into it.
    Raises:
        UsageError: the boundaries are not ascending, or do not end with the sequence.
    """
    starts, longest = batch["cu_seqlens"], batch["max_seqlen"]
    if starts is None or longest is None:
        raise UsageError("a batch of packed sequences lacks cu_seqlens or max_seqlen")
    # First token of each document, and the end of the last one.
    starts = starts[0]
    total = int(starts[-1])
    if int(starts[0]) or bool((starts.diff() < 0).any()) or total % seq_length or not total:
        raise UsageError(
            f"a packed batch has documents that begin at {starts.tolist()}: these must ascend from "
            f"0 to a multiple of --seq-length {seq_length}"
        )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=int(longest),
        max_seqlen_kv=int(longest),
        tokens_per_sample=seq_length,
    )


def other_documents(starts: Tensor) -> Tensor:
    """Return the mask [1, 1, t, t] of what a token must not see: later tokens, other documents.

    Example: documents that begin at 0, 2 and end at 3 hide 1 and 2 from token 0, 2 from 1, and 0
    and 1 from token 2.
    """
    # Tokens of each document; then each token's document and place.
    lengths = starts.diff().long()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=starts.device), lengths)
    place = torch.arange(len(document), device=starts.device)
    hidden = (document[:, None] != document[None, :]) | (place[None, :] > place[:, None])
    return hidden[None, None]


class PackedAttention(MaskedAttention):
    """Core attention inside the documents of a packed sequence."""

    asked_by = "packed sequences (--sft, --dataloader-inter-document-masking)"
    instead = "leave the window out"

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

        Shapes: queries `[t, heads, d]`, keys and values `[t, groups, d]`, of which the t tokens are
        a micro-batch; the result `[t, heads * d]`.
        """
        mask = other_documents(packed_seq_params.cu_seqlens_q)
        # Megatron's local attention wants an axis of the batch: [t, 1, heads, d].
        parts = (part.unsqueeze(1) for part in (query, key, value))
        return super().forward(*parts, mask, None, attention_bias).squeeze(1)
