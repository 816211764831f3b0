"""Attention over sequences that context-parallel ranks divide, without Transformer Engine.

Megatron's local `DotProductAttention` refuses context parallelism, and Transformer Engine's kernels
need a GPU. Here every rank gathers the keys and values of the whole sequence and computes the rows
of its own queries, with torch's fused kernels where the job's flags allow it: the same as on one
rank, row by row, for more traffic than a ring (each key and value crosses to every other rank in
the forward pass; their gradients come back summed).  Pieces of unlike length are filled up to the
longest, so that one collective gathers them. With Transformer Engine its own attention is used,
with `--cp-comm-type`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

from megatron_hetero.runtime.parallel.context_place import context_place
from megatron_hetero.runtime.parallel.masked_attention import MaskedAttention


class GatheredAttention(MaskedAttention):
    """Core attention of a rank's own queries with the keys and values of all ranks."""

    asked_by = "context parallelism"
    instead = "no cp in the plan"

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Megatron's constructor refuses context parallelism, which this class brings itself.
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.context_parallel_size = size
        self._group = self.pg_collection.cp

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

        Shapes: queries `[s_r, b, heads, d]`, keys and values `[s_r, b, groups, d]`, where s_r is
        s / c, or by unlike shares the rank's own number of tokens.

        `attention_mask`, which a dataset makes, is not read: it is the causal one
        (`--reset-attention-mask` is refused).
        """
        place = context_place(self.config, len(query), self._group)
        order = place.order_of_gathered(query.device)
        key, value = (
            gathered_pieces(part, place.most_tokens, self._group).index_select(0, order)
            for part in (key, value)
        )
        return self.rows(query, key, value, place.runs)


def gathered_pieces(part: Tensor, num_tokens: int, group: Any) -> Tensor:
    """Gather keys or values from all ranks of a group, in rank order; the gradients come back
    summed.

    Args:
        part: the rank's own, shape `[s_r, b, groups, d]`.
        num_tokens: to which shorter pieces are filled up with zeros: most that a rank has.
        group: the ranks.
    """
    missing = num_tokens - len(part)
    if missing:
        part = pad(part, (0, 0, 0, 0, 0, 0, 0, missing))
    return gather_from_sequence_parallel_region(part, group=group)
