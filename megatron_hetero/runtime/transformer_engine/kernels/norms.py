"""LayerNorm and RMSNorm, forward and backward, with the statistics that the layers keep.

Source: Transformer Engine, `common/normalization`; statistics are in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_hetero.runtime.transformer_engine.kernels.float8 import quantize
from megatron_hetero.runtime.transformer_engine.kernels.widths import torch_type, wide


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise rows `[..., h]`; return them, their means and inverse deviations `[rows]`.

    Args:
        x: the rows.
        weight: [h].
        bias: [h].
        eps: added to the variance.
        ln_out: tensor to write into, plain or fp8; None makes one of type `otype`.
        quantizer: casts the result to fp8; None leaves it in `otype`.
        otype: type of a new result; None is that of `x`.
        sm_margin: multiprocessors of a GPU to leave alone.
        zero_centered_gamma: `weight` is kept minus 1.
    """
    rows = wide(x)
    mean = rows.mean(-1)
    inverse = torch.rsqrt(rows.var(-1, unbiased=False) + eps)
    normed = (rows - mean[..., None]) * inverse[..., None]
    result = normed * _gamma(weight, zero_centered_gamma) + wide(bias)
    written = _written(result, ln_out, torch_type(otype, x.dtype), quantizer)
    return written, mean.flatten(), inverse.flatten()


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `x`, `gamma` and the bias of `layernorm_fwd`.

    Args:
        dz: gradient of the result, [..., h].
        x: the rows of the forward pass.
        mu: its means.
        rsigma: its inverse deviations.
        gamma: its weight.
        sm_margin: as there.
        zero_centered_gamma: as there.
    """
    rows, inverse, gradient = _of_rows(dz, x, rsigma)
    normed = (rows - mu.reshape(-1, 1)) * inverse
    inner = gradient * _gamma(gamma, zero_centered_gamma)
    # The normed rows ignore shifts and scales of `x`: their directions leave the gradient.
    mean, along = inner.mean(-1, keepdim=True), (inner * normed).mean(-1, keepdim=True)
    dx = inverse * (inner - mean - normed * along)
    dgamma, dbeta = (gradient * normed).sum(0), gradient.sum(0)
    return dx.reshape(x.shape).to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """Divide rows `[..., h]` by their root mean square; return them, None and its inverse.

    Args:
        x: as in `layernorm_fwd`.
        weight: as there.
        eps: as there.
        ln_out: as there.
        quantizer: as there.
        otype: as there.
        sm_margin: as there.
        zero_centered_gamma: as there.
    """
    rows = wide(x)
    inverse = torch.rsqrt(rows.pow(2).mean(-1) + eps)
    result = rows * inverse[..., None] * _gamma(weight, zero_centered_gamma)
    written = _written(result, ln_out, torch_type(otype, x.dtype), quantizer)
    return written, None, inverse.flatten()


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and `gamma` of `rmsnorm_fwd`.

    Args:
        dz: as in `layernorm_bwd`.
        x: as there.
        rsigma: as there.
        gamma: as there.
        sm_margin: as there.
        zero_centered_gamma: as there.
    """
    dx, dgamma = _rmsnorm_bwd(dz, x, rsigma, gamma, zero_centered_gamma)
    return dx.to(x.dtype), dgamma


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `rmsnorm_bwd`, with `add` added to the gradient of `x` before
    rounding.

    Args:
        dz: as in `layernorm_bwd`.
        x: as there.
        add: gradient of the same rows on another way (a residual).
        rsigma: as there.
        gamma: as there.
        sm_margin: as there.
        zero_centered_gamma: as there.
    """
    dx, dgamma = _rmsnorm_bwd(dz, x, rsigma, gamma, zero_centered_gamma)
    return (dx + wide(add).reshape(dx.shape)).to(x.dtype), dgamma


def _rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    rows, inverse, gradient = _of_rows(dz, x, rsigma)
    normed = rows * inverse
    # The normed rows ignore the scale of `x`: its direction leaves the gradient.
    inner = gradient * _gamma(gamma, zero_centered_gamma)
    dx = inverse * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return dx.reshape(x.shape), (gradient * normed).sum(0).to(gamma.dtype)


def _of_rows(dz: Tensor, x: Tensor, rsigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows `[rows, h]`, their inverse deviations `[rows, 1]`, gradients `[rows, h]`."""
    size = dz.shape[-1]
    return wide(x.reshape(-1, size)), rsigma.reshape(-1, 1), wide(dz.reshape(-1, size))


def _gamma(weight: Tensor, is_zero_centered: bool) -> Tensor:
    return wide(weight) + 1 if is_zero_centered else wide(weight)


def _written(result: Tensor, out: Any, kind: torch.dtype, quantizer: Any) -> Any:
    if quantizer is not None:
        # The compiled function casts what it has rounded to this type.
        return quantize(result.to(kind), quantizer, out)
    if out is None:
        return result.to(kind)
    out.copy_(result)
    return out
