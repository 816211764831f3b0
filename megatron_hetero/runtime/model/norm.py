"""Norms for the local layer spec that allow sequence parallelism, and residuals in fp32.

Without Transformer Engine or Apex, Megatron uses torch's norms and refuses sequence parallelism
with them, because its gradient sync cannot know that their gradients are partial sums. One
attribute tells it; the arithmetic is torch's either way. Nor do torch's norms take what is in fp32
beside weights in half precision (`--fp32-residual-connection`): here they compute in fp32, and hand
on what the next product wants, as Transformer Engine's do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch.nn.functional import layer_norm, rms_norm

from megatron_hetero.runtime.model.spec_parts import LayerSpec, with_parts


class SequenceParallelTorchNorm:
    """Megatron's `WrappedTorchNorm` with parameters marked for sequence parallelism, also for
    residuals in fp32."""

    def __new__(
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> torch.nn.Module:
        # Megatron's wrapper refuses sequence parallelism; its parameters get the mark below.
        enabled, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = WrappedTorchNorm(config, hidden_size, eps, **kwargs)
        finally:
            config.sequence_parallel = enabled
        for parameter in norm.parameters():
            parameter.sequence_parallel = enabled
        if config.fp32_residual_connection:
            norm.forward = partial(_from_fp32, norm)
        return norm


def _from_fp32(norm: torch.nn.LayerNorm | torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Norm `x` in fp32, whatever the weights' precision, and return the result in the weights'
    precision."""
    weight, shape = norm.weight.float(), list(norm.normalized_shape)
    if isinstance(norm, torch.nn.LayerNorm):
        result = layer_norm(x.float(), shape, weight, norm.bias.float(), norm.eps)
    else:
        result = rms_norm(x.float(), shape, weight, norm.eps)
    return result.to(norm.weight.dtype)


def local_block_spec(
    spec: LayerSpec, config: Any, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return a block of `spec`'s layers for this stage, its final norm included.

    The final norm is of the class that Megatron's block takes, Transformer Engine's where that is
    installed, also for local layers. Only torch's is replaced: all stages have the same state
    then, whether they divide the sequence or not.

    Args:
        spec: the spec of every layer, or of the stage's layers.
        config: Megatron's configuration of the transformer.
        vp_stage: number of the model chunk.
    """
    parts: dict[Any, Any] = {WrappedTorchNorm: SequenceParallelTorchNorm}
    spec = with_parts(spec, parts)
    # Either the stage's layers one by one, or one spec for every layer.
    if isinstance(spec, TransformerBlockSubmodules):
        layers, final = list(spec.layer_specs or ()), spec.layer_norm
    else:
        layers, final = [spec] * get_num_layers_to_build(config, vp_stage), LayerNormImpl
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=parts.get(final, final))
