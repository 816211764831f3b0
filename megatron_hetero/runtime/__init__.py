"""Training in Megatron's loop: everything here may import torch and Megatron.
Rooms: `job` (from flags to `pretrain`), `model`, `parallel` (groups, boundaries), `steps`,
`gradients` (buckets, exchange, optimizer), `state` (checkpoints), `observe` (times and logs),
`sequences` (documents dealt to groups step by step), `transformer_engine` (its own layers on a CPU)
and `megatron` (replaced Megatron symbols).

backend  CPU training: substitutes for what Megatron assumes of CUDA
batches  global batches, divided among replicas
"""

from megatron_hetero.runtime.transformer_engine.installed import REASON

# Before any module of this package imports Megatron, which imports Transformer Engine.
NO_TRANSFORMER_ENGINE = REASON
"""Reason why Megatron's own layers are used; None where Transformer Engine is usable."""
