"""Products of linear layers against torch's own, and against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.transformer_engine.kernels.enums import DType
from megatron_hetero.runtime.transformer_engine.kernels.products import (
    generic_gemm,
    te_general_grouped_gemm,
    wgrad_gemm_accum_fp32,
)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gemm(a: torch.Tensor, b: torch.Tensor, layout: str, **given: Any) -> Any:
    bias, out, gelu_in = (given.get(name) for name in ("bias", "out", "gelu_in"))
    return generic_gemm(
        a, layout[0] == "T", b, layout[1] == "T", out, given.get("quantizer"),
        given.get("out_dtype"), bias, DType.kFloat32, given.get("gelu", False), gelu_in,
        given.get("grad", False), None, 0, given.get("accumulate", False), True,
        comm_overlap=given.get("overlap"), alpha=given.get("alpha", 1.0), beta=given.get("beta"),
    )  # fmt: skip


@pytest.mark.parametrize("has_gelu", [False, True])
def test_forward_and_backward_of_a_linear_layer(has_gelu: bool) -> None:
    """Output, input's, weight's and bias's gradients, and the input of GELU."""
    x = drawn(3, 2, 5).requires_grad_()
    w, bias = drawn(7, 5, seed=1).requires_grad_(), drawn(7, seed=2).requires_grad_()
    before = functional.linear(x, w, bias)
    y = functional.gelu(before, approximate="tanh") if has_gelu else before
    dy = drawn(*y.shape, seed=3)
    y.backward(dy)
    with torch.no_grad():
        out, _, pre, _ = gemm(w, x, "TN", bias=bias, gelu=has_gelu)
        assert torch.allclose(out, y, atol=1e-6)
        assert (pre is not None) == has_gelu
        if has_gelu:
            assert torch.allclose(pre, before, atol=1e-6)
            # The next layer's input gradient, times the derivative at this layer's GELU.
            unit = torch.eye(7)
            dy, *_ = gemm(unit, dy, "NN", gelu=True, gelu_in=pre, grad=True)
        dx, *_ = gemm(w, dy, "NN", grad=True)
        dw, dbias, *_ = gemm(x, dy, "NT", bias=bias, grad=True)
    assert torch.allclose(dx, x.grad, atol=1e-6)
    assert torch.allclose(dw, w.grad, atol=1e-5)
    assert torch.allclose(dbias, bias.grad, atol=1e-5)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_product_is_added_in_fp32_and_rounded_once(kept: torch.dtype) -> None:
    x, dy = drawn(6, 5, dtype=torch.bfloat16), drawn(6, 4, seed=1, dtype=torch.bfloat16)
    main = drawn(4, 5, seed=2, dtype=kept)
    exact = main.double() + dy.double().t() @ x.double()
    other = main.clone()
    gemm(x, dy, "NT", out=main, accumulate=True, grad=True)
    wgrad_gemm_accum_fp32(x, dy, other)
    for found in (main, other):
        assert torch.equal(found, exact.to(kept)) or torch.allclose(found.double(), exact, 1e-6)
    scaled, *_ = gemm(x, dy, "NT", alpha=0.5, out=torch.ones(4, 5), accumulate=True, beta=2.0)
    assert torch.allclose(scaled, 2 + 0.5 * (dy.float().t() @ x.float()), atol=1e-5)


def test_bf16_rounds_the_result_only() -> None:
    x, w = drawn(64, 256, dtype=torch.bfloat16), drawn(32, 256, seed=1, dtype=torch.bfloat16)
    y, *_ = gemm(w, x, "TN")
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, (x.float() @ w.float().t()).bfloat16())
    wide, *_ = gemm(w, x, "TN", out_dtype=DType.kFloat32)
    assert torch.equal(wide, x.float() @ w.float().t())


def test_grouped_products_are_those_of_each_group() -> None:
    """Of three experts the second has no token."""
    splits = [2, 0, 3]
    x, weights = drawn(5, 4), [drawn(6, 4, seed=i + 1) for i in range(3)]
    biases = [drawn(6, seed=i + 4) for i in range(3)]
    parts = list(x.split(splits))
    none = [torch.empty(0)] * 3

    def grouped(a: Any, b: Any, layout: str, out: Any, bias: Any, **given: Any) -> None:
        te_general_grouped_gemm(
            a, layout[0] == "T", b, layout[1] == "T", out, None, splits, bias, DType.kFloat32,
            given.get("single", False), none, given.get("grad", False), [], 0,
            given.get("accumulate", False), True,
        )  # fmt: skip

    out = torch.full((5, 6), 7.0)
    grouped(weights, parts, "TN", [out], biases, single=True)
    expected = [functional.linear(p, w, b) for p, w, b in zip(parts, weights, biases, strict=True)]
    assert torch.allclose(out, torch.cat(expected), atol=1e-6)
    dy = drawn(5, 6, seed=9)
    sums = [torch.ones(6, 4) for _ in range(3)]
    bias_gradients = [torch.full((6,), 7.0) for _ in range(3)]
    pieces = list(dy.split(splits))
    grouped(parts, pieces, "NT", sums, bias_gradients, grad=True, accumulate=True)
    for i in range(3):
        assert torch.allclose(sums[i], 1 + pieces[i].t() @ parts[i], atol=1e-6)
        assert torch.allclose(bias_gradients[i], pieces[i].sum(0), atol=1e-6)
    grouped(parts, pieces, "NT", sums, none, grad=True)
    assert torch.equal(sums[1], torch.zeros(6, 4))


def test_fp8_and_exchanges_under_products_are_refused_by_name() -> None:
    x = drawn(2, 2)
    with pytest.raises(UnsupportedError, match="generic_gemm for a object"):
        gemm(x, x, "TN", quantizer=object())
    with pytest.raises(UnsupportedError, match="--tp-comm-overlap"):
        gemm(x, x, "TN", overlap=object())
    with pytest.raises(UnsupportedError, match="generic_gemm of a dict"):
        gemm({}, x, "TN")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="with GELU"):
        te_general_grouped_gemm(
            [x], True, [x], False, [x], None, [2], [x], None, False, [x], False, [], 0, False, True
        )
