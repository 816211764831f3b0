"""Attention over sequences that context-parallel ranks divide, without Transformer Engine.

Megatron's local `DotProductAttention` refuses context parallelism, and Transformer Engine's kernels
need a GPU. Here every rank gathers the keys and values of the whole sequence and computes the rows
of its own queries: the same arithmetic as on one rank, row by row, for more traffic than a ring
(each key and value crosses to every other rank in the forward pass; their gradients come back
summed). With Transformer Engine its own attention is used, with `--cp-comm-type`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_hetero.errors import UnsupportedError


class GatheredAttention(DotProductAttention):
    """Megatron's core attention of a rank's own queries with the keys and values of all ranks.

    Raises:
        UnsupportedError: the attention is not causal, or looks back through a window.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, *args: Any, **kwargs: Any
    ) -> None:
        if attn_mask_type != AttnMaskType.causal or config.window_size is not None:
            raise UnsupportedError(
                "context parallelism with local layers: only causal attention without "
                "--window-size is supported. Use --transformer-impl transformer_engine, or no cp "
                "in the plan."
            )
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            # "padding" stands for a mask that is given, which the causal one of some rows is.
            super().__init__(config, layer_number, AttnMaskType.padding, *args, **kwargs)
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

        Shapes: queries `[s / c, b, heads, d]`, keys and values `[s / c, b, groups, d]`.

        `attention_mask`, which a dataset makes, is not read: it is the causal one
        (`--reset-attention-mask` is refused).
        """
        positions = own_positions(len(query), self._group.size(), self._group.rank(), query.device)
        order = order_of_gathered(len(query), self._group.size(), query.device)
        gathered = (
            gather_from_sequence_parallel_region(part, group=self._group).index_select(0, order)
            for part in (key, value)
        )
        later = torch.arange(len(order), device=query.device) > positions.unsqueeze(1)
        mask = later.view(1, 1, *later.shape)
        return super().forward(query, *gathered, mask, None, attention_bias, packed_seq_params)


def own_positions(num_own: int, size: int, rank: int, device: Any = None) -> Tensor:
    """Return the sequence positions of the `num_own` tokens of a context-parallel rank.

    Of 2 * `size` chunks the rank has number `rank` and, counted from the end, number `rank` again,
    as in Megatron. Example: 8 tokens on 2 ranks are 0, 1, 6, 7 on rank 0 and 2, 3, 4, 5 on rank 1.

    Args:
        num_own: tokens of the rank.
        size: number of context-parallel ranks.
        rank: the rank among them.
        device: device of the result.
    """
    chunk = num_own // 2
    numbers = (rank, 2 * size - 1 - rank)
    return torch.cat([torch.arange(n * chunk, (n + 1) * chunk, device=device) for n in numbers])


def order_of_gathered(num_own: int, size: int, device: Any = None) -> Tensor:
    """Return, for each position, its index in the tensor gathered rank by rank."""
    gathered = torch.cat([own_positions(num_own, size, rank, device) for rank in range(size)])
    return torch.argsort(gathered)
