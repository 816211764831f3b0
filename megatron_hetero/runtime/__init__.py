"""Training in Megatron's loop: everything here may import torch and Megatron.
Rooms: `job` (from flags to `pretrain`), `model`, `parallel` (groups, boundaries, schedule),
`gradients` (buckets, exchange, optimizer), `state` (checkpoints), `observe` (times and logs),
`sequences` (documents dealt to groups step by step) and `megatron` (replaced Megatron symbols).

backend  CPU training: substitutes for what Megatron assumes of CUDA
"""

from megatron_hetero.runtime.model.transformer_engine import hide_if_broken

# Before any module of this package imports Megatron, which imports Transformer Engine.
NO_TRANSFORMER_ENGINE = hide_if_broken()
"""Reason why Megatron's own layers are used; None where Transformer Engine is usable."""
