"""Types of numbers by Transformer Engine's names, and the width in which a function computes."""

from __future__ import annotations

from typing import Any

import torch

from megatron_hetero.runtime.transformer_engine.kernels.enums import DType

TORCH_TYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_type(named: Any, default: torch.dtype) -> torch.dtype:
    """Return the torch type of a `DType`, of its number or of a torch type; None is `default`."""
    if named is None:
        return default
    return named if isinstance(named, torch.dtype) else TORCH_TYPES[DType(int(named))]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the width in which a compiled function computes: fp32, or wider."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
