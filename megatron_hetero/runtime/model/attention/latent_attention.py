"""Multi-latent attention on a tensor-parallel group, with every rank's part of one gradient.

The rotary part of the keys is one vector for all heads.  Each rank of a group computes its own
heads with it, so its gradient is the sum over the group.  Megatron 0.19 sums it only where the
projection to the latents is a whole copy on every rank and sequences are divided; with its local
layers, which divide that projection, or without sequence parallelism each rank goes on with the
gradient of its own heads.  Here the sum is taken in both cases; the arithmetic is Megatron's
otherwise, and on one rank all of it.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class LatentSelfAttention(MLASelfAttention):
    """Megatron's attention with the gradient of the shared rotary keys summed over its group."""

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Project to the latents.

        Args:
            hidden_states: `[s / t, b, h]` with sequence parallelism over t ranks, else `[s, b, h]`.
        Returns:
            The latents of the queries, and those of keys and values with the rotary keys behind
            them, each whole: `[s / t, b, rank]` or `[s, b, rank]`.
        """
        queries, keys = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1:
            return queries, keys
        config = self.config
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        # Local layers divide the projection, so each rank has a part of its columns.
        if keys.size(-1) != sum(sizes):
            keys = gather_from_tensor_model_parallel_region(keys, group=self.tp_group)
            if config.sequence_parallel:
                # Gathered again by Megatron, whose gather sums gradients on the way back.
                return queries, scatter_to_sequence_parallel_region(keys, group=self.tp_group)
        # Unchanged forward; backward the gradient of the rotary keys is summed over the group.
        if not config.sequence_parallel:
            latents, rotary = torch.split(keys, sizes, dim=-1)
            rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
            keys = torch.cat([latents, rotary], dim=-1)
        return queries, keys
