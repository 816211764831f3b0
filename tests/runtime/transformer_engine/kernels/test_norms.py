"""Norms against torch's autograd, in fp32 and bf16, with weights kept minus 1 too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_hetero.runtime.transformer_engine.kernels import norms
from tests.runtime.transformer_engine.kernels.test_products import drawn

_EPS = 1e-5


def _torchs(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if kind == "rmsnorm":
        return functional.rms_norm(x, (x.shape[-1],), weight, _EPS)
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, _EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_norm_and_its_gradients(kind: str, is_centered: bool, dtype: torch.dtype) -> None:
    x, dz = drawn(6, 8, dtype=dtype) + 0.5, drawn(6, 8, seed=1, dtype=dtype)
    weight, bias = drawn(8, seed=2, dtype=dtype), drawn(8, seed=3, dtype=dtype)
    point = [t.float().requires_grad_() for t in (x, weight, bias)]
    expected = _torchs(kind, point[0], point[1] + is_centered, point[2])
    expected.backward(dz.float())
    statistics: Any
    if kind == "layernorm":
        y, mean, inverse = norms.layernorm_fwd(
            x, weight, bias, _EPS, None, None, None, 0, is_centered
        )
        statistics = mean, inverse
        found = norms.layernorm_bwd(dz, x, mean, inverse, weight, 0, is_centered)
    else:
        y, _, inverse = norms.rmsnorm_fwd(x, weight, _EPS, None, None, None, 0, is_centered)
        statistics = (inverse,)
        found = norms.rmsnorm_bwd(dz, x, inverse, weight, 0, is_centered)  # type: ignore[assignment]
        total, dgamma = norms.rmsnorm_bwd_add(dz, x, x, inverse, weight, 0, is_centered)
        step = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(total.float(), point[0].grad + x.float(), step, step)
        assert torch.equal(dgamma, found[1])
    assert all(s.dtype == torch.float32 and s.shape == (6,) for s in statistics)
    # One rounding of a result, in fp32 the rest of a sum.
    bound = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    assert y.dtype == dtype and torch.allclose(y.float(), expected, bound, bound)
    for gradient, leaf in zip(found, point, strict=False):
        assert gradient.dtype == dtype
        assert torch.allclose(gradient.float(), leaf.grad, bound, bound)


def test_a_result_goes_where_it_is_asked_for() -> None:
    x, weight = drawn(3, 4), torch.ones(4)
    out = torch.empty(3, 4, dtype=torch.bfloat16)
    y, *_ = norms.layernorm_fwd(x, weight, weight, _EPS, out, None, None, 0, False)
    assert y is out
    wide, _, _ = norms.rmsnorm_fwd(x.bfloat16(), weight, _EPS, None, None, torch.float32, 0, False)
    assert wide.dtype == torch.float32
