"""Norms for the local layer spec that allow sequence parallelism.

Without Transformer Engine or Apex, Megatron uses torch's norms and refuses sequence parallelism
with them, because its gradient sync cannot know that their gradients are partial sums. One
attribute tells it; the arithmetic is torch's either way.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron_hetero.runtime.model.spec_parts import LayerSpec, with_parts


class SequenceParallelTorchNorm:
    """Megatron's `WrappedTorchNorm` whose parameters are marked for sequence parallelism."""

    def __new__(
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> torch.nn.Module:
        enabled, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = WrappedTorchNorm(config, hidden_size, eps, **kwargs)
        finally:
            config.sequence_parallel = enabled
        for parameter in norm.parameters():
            parameter.sequence_parallel = enabled
        return norm


def local_block_spec(
    spec: LayerSpec, config: Any, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return a block of `spec`'s layers for this stage, its final norm included.

    Args:
        spec: the spec of every layer, or of the stage's layers.
        config: Megatron's configuration of the transformer.
        vp_stage: number of the model chunk.
    """
    spec = with_parts(spec, {WrappedTorchNorm: SequenceParallelTorchNorm})
    if isinstance(spec, TransformerBlockSubmodules):
        layers = list(spec.layer_specs or ())
    else:
        layers = [spec] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelTorchNorm)
