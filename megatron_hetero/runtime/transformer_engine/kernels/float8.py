"""Casts to fp8 with one scale for a tensor: that of the tensor at hand (`--fp8-recipe tensorwise`),
or one from earlier steps (`delayed`).

Numbers are torch's float8 types, kept as bytes, as on a GPU that multiplies rows by rows alone
(Ada, Hopper): a tensor has its rows, its transpose or both, and a product takes the one that such a
GPU takes. Blocks (`blockwise`, `mxfp8`, fp4) are refused.

Source: Transformer Engine, `common/recipe/recipe_common.cuh` (`compute_scale_from_amax`) and
`pytorch/csrc/quantizer.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.transformer_engine.kernels.widths import torch_type, wide


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Cast a tensor to fp8.

    Args:
        tensor: of any shape.
        quantizer: of Transformer Engine; it says the type, the scale, and whether rows or the
            transpose are asked for.
        output: fp8 tensor to write into; None makes one.
        noop: a flag; if it is not 0, `output` stays as it is.
    Returns:
        The fp8 tensor.
    Raises:
        UnsupportedError: the quantizer has scales of blocks.
    """
    refuse_blocks(quantizer, "quantize")
    if noop is not None and bool(noop.item()):
        return output
    scale = _scale_of(tensor, quantizer)
    kind = torch_type(quantizer.dtype, torch.float8_e4m3fn)
    # A number beyond the largest is the largest.
    most = torch.finfo(kind).max
    cast = (tensor.float() * scale).clamp(-most, most).to(kind).view(torch.uint8).contiguous()
    if output is None:
        output = create_empty_quantized_tensor(
            quantizer, list(tensor.shape), tensor.dtype, tensor.device
        )
    # In rows, as a transpose, or both, as the quantizer asks.
    if output._data is not None:
        output._data.copy_(cast.view(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(fp8_transpose(cast, None).view(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_((1 / scale).reshape(output._scale_inv.shape))
    return output


def _scale_of(tensor: Tensor, quantizer: Any) -> Tensor:
    """Return the factor of a cast, shape [1]; a delayed one notes the largest number for later."""
    # A tensor without elements has no largest one.
    largest = tensor.abs().amax().float() if tensor.numel() else tensor.new_zeros(()).float()
    if hasattr(quantizer, "amax"):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, largest.reshape(quantizer.amax.shape)))
        return quantizer.scale.detach().clone().reshape(1)
    # Ranks that hold parts of one tensor cast by one scale.
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    largest = largest.clamp(min=quantizer.amax_epsilon)
    most = torch.finfo(torch_type(quantizer.dtype, torch.float8_e4m3fn)).max
    # Nothing but zeros, or a number that is none: the cast does not scale.
    if not torch.isfinite(largest) or largest == 0:
        return torch.ones(1)
    scale = (most / largest).clamp(max=torch.finfo(torch.float32).max)
    # The largest power of 2 that is not above the scale.
    if quantizer.force_pow_2_scales:
        scale = torch.ldexp(torch.ones(()), torch.frexp(scale).exponent - 1)
    return scale.reshape(1)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: Any, device: Any, pin_memory: bool = False
) -> Any:
    """Make an fp8 tensor without numbers, in rows, as a transpose, or both.

    Args:
        quantizer: of Transformer Engine.
        shape: of the tensor.
        dtype: type that the tensor stands for.
        device: its device.
        pin_memory: memory of a host, which a CPU's is.
    Raises:
        UnsupportedError: the quantizer has scales of blocks.
    """
    refuse_blocks(quantizer, "create_empty_quantized_tensor")
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    rows = transpose = None
    if quantizer.rowwise_usage:
        rows = torch.empty(list(shape), dtype=torch.uint8)
    if quantizer.columnwise_usage:
        # The last axis comes first, as `fp8_transpose` has it.
        turned = [shape[-1], *shape[:-1]] if len(shape) else []
        transpose = torch.empty(turned, dtype=torch.uint8)
    kind = torch_type(dtype, torch.float32)
    parts = {
        "data": rows,
        "data_transpose": transpose,
        "fp8_scale_inv": torch.ones(1),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    # Tensors inside of a layer need no autograd, and no shape of their own.
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=kind, **parts)
    return Float8Tensor(shape=tuple(shape), dtype=kind, device=torch.device("cpu"), **parts)


def in_fp8(result: Tensor, quantizer: Any, function: str) -> Any:
    """Return the result of a function as it is, or where there is a quantizer in fp8.

    Raises:
        UnsupportedError: the quantizer has scales of blocks; the message names the function.
    """
    if quantizer is None:
        return result
    refuse_blocks(quantizer, function)
    return quantize(result, quantizer)


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the gradient of a bias, summed over rows before the cast, and the fp8 gradient."""
    total = wide(gradient).reshape(-1, gradient.shape[-1]).sum(0).to(gradient.dtype)
    return total, quantize(gradient, quantizer)


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Return bytes `[..., columns]` as `[columns, ...]`, in `out` if it is given."""
    turned = data.movedim(-1, 0).contiguous() if data.dim() else data
    if out is None:
        return turned
    out.copy_(turned.view(out.shape))
    return out


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """Return the numbers of an fp8 tensor in a wider type."""
    return unscaled(tensor._data, tensor).to(torch_type(dtype, torch.float32))


def rows_of(tensor: Any, is_transposed: bool) -> Tensor:
    """Return a factor of a product as a matrix of rows in fp32.

    Args:
        tensor: plain, or fp8 with a scale for the tensor.
        is_transposed: the product sums over its rows, for which a GPU takes the transpose.
    Raises:
        UnsupportedError: fp8 with scales of blocks.
        RuntimeError: an fp8 tensor without the form that the product needs on a GPU.
    """
    if isinstance(tensor, Tensor) and not hasattr(tensor, "_scale_inv"):
        return wide(tensor.reshape(-1, tensor.shape[-1]))
    if not hasattr(tensor, "_fp8_dtype") or not hasattr(tensor, "_transpose"):
        raise UnsupportedError(
            f"Transformer Engine's generic_gemm of a {type(tensor).__name__} has no counterpart on "
            "a CPU. Use --fp8-recipe tensorwise, or train in bf16."
        )
    # A transpose that is out of date counts as absent.
    data, turned = tensor._data, None if tensor._transpose_invalid else tensor._transpose
    chosen = turned if is_transposed else data
    if chosen is None:
        form = "transpose" if is_transposed else "rows"
        raise RuntimeError(f"an fp8 product without the {form} of its factor, which a GPU needs")
    # The transpose has the columns first: turned, it is the matrix of rows.
    if is_transposed:
        return unscaled(chosen.reshape(chosen.shape[0], -1), tensor).t()
    return unscaled(chosen.reshape(-1, chosen.shape[-1]), tensor)


def unscaled(data: Tensor, tensor: Any) -> Tensor:
    """Return bytes of an fp8 tensor as numbers in fp32."""
    return data.view(torch_type(tensor._fp8_dtype, torch.float8_e4m3fn)).float() * tensor._scale_inv


def refuse_blocks(quantizer: Any, function: str) -> None:
    """Refuse scales of blocks, and types below fp8.

    Raises:
        UnsupportedError: the message names the function.
    """
    if type(quantizer).__name__ not in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        raise UnsupportedError(
            f"Transformer Engine's {function} for a {type(quantizer).__name__} has no counterpart "
            "on a CPU. Use --fp8-recipe tensorwise, or train in bf16."
        )
