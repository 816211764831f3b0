"""Norms for the local layer spec that allow sequence parallelism.

Without Transformer Engine or Apex, Megatron uses torch's norms and refuses sequence parallelism
with them, because its gradient sync cannot know that their gradients are partial sums. One
attribute tells it; the arithmetic is torch's either way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)


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


def with_sequence_parallel_norms(layer: ModuleSpec) -> ModuleSpec:
    """Replace torch's norms wherever they stand in a layer spec."""
    submodules = layer.submodules
    if submodules is None:
        return layer
    changed = {}
    for name, value in vars(submodules).items():
        if value is WrappedTorchNorm:
            changed[name] = SequenceParallelTorchNorm
        elif isinstance(value, ModuleSpec):
            changed[name] = with_sequence_parallel_norms(value)
    return replace(layer, submodules=replace(submodules, **changed))


def local_block_spec(
    spec: ModuleSpec | TransformerBlockSubmodules, config: Any, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return a block of `spec`'s layers for this stage, its final norm included.

    Args:
        spec: the spec of every layer; or, as Megatron has it for experts, of the stage's layers.
        config: Megatron's configuration of the transformer.
        vp_stage: number of the model chunk.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = list(spec.layer_specs)
    else:
        layers = [spec] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[with_sequence_parallel_norms(layer) for layer in layers],
        layer_norm=SequenceParallelTorchNorm,
    )
