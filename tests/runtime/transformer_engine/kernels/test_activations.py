"""Activations against autograd on the formulas of the papers, and softmax of unfused attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.transformer_engine.kernels import softmax
from megatron_hetero.runtime.transformer_engine.kernels.activations import functions
from tests.runtime.transformer_engine.kernels.test_products import drawn

_FUNCTIONS = functions()
_OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.GELU(approximate="tanh"),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "srelu": lambda x: x.clamp(min=0).square(),
    "silu": torch.nn.SiLU(),
}
_GATES = {
    "glu": torch.sigmoid,
    **{name: _OF_ONE[gate] for name, gate in (
        ("geglu", "gelu"), ("qgeglu", "qgelu"), ("reglu", "relu"), ("sreglu", "srelu"),
        ("swiglu", "silu"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", [*_OF_ONE, *_GATES])
def test_an_activation_and_its_derivative(name: str) -> None:
    x = (drawn(5, 6) * 3).requires_grad_()
    expected = _OF_ONE[name](x) if name in _OF_ONE else _GATES[name](x[:, :3]) * x[:, 3:]
    dy = drawn(*expected.shape, seed=1)
    expected.backward(dy)
    y = _FUNCTIONS[name](x.detach(), None)
    assert torch.allclose(y, expected, atol=1e-6)
    assert torch.allclose(_FUNCTIONS[f"d{name}"](dy, x.detach(), None), x.grad, atol=1e-5)
    half = x.detach().bfloat16()
    assert _FUNCTIONS[name](half).dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match=f"{name} for a object"):
        _FUNCTIONS[name](x, object())


def test_every_activation_is_tested() -> None:
    assert set(_FUNCTIONS) == {p + n for n in (*_OF_ONE, *_GATES) for p in ("", "d")}


@pytest.mark.parametrize("kind", ["plain", "masked", "causal", "upper"])
def test_a_softmax_and_its_gradient(kind: str) -> None:
    keys = 4 if kind != "causal" else 6
    x = drawn(2, 3, 4, keys).requires_grad_()
    hidden = torch.zeros(4, keys, dtype=torch.bool)
    if kind == "masked":
        hidden = drawn(4, keys, seed=1) > 0.5
    elif kind in ("causal", "upper"):
        hidden = torch.ones(4, keys, dtype=torch.bool).triu(1 + keys - 4)
    expected = functional.softmax((x * 0.3).masked_fill(hidden, float("-inf")), -1)
    dy = drawn(*x.shape, seed=2)
    expected.backward(dy)
    point = x.detach()
    if kind == "plain":
        y = softmax.scaled_softmax_forward(point, 0.3)
        dx = softmax.scaled_softmax_backward(dy, y, 0.3)
    elif kind == "masked":
        mask = hidden[None, None].to(torch.uint8)
        y = softmax.scaled_masked_softmax_forward(point, mask, 0.3)
        dx = softmax.scaled_masked_softmax_backward(dy, y, 0.3)
    elif kind == "causal":
        y = softmax.scaled_aligned_causal_masked_softmax_forward(point, 0.3)
        dx = softmax.scaled_aligned_causal_masked_softmax_backward(dy, y, 0.3)
    else:
        y = softmax.scaled_upper_triang_masked_softmax_forward(point, 0.3)
        dx = softmax.scaled_upper_triang_masked_softmax_backward(dy, y, 0.3)
    assert torch.allclose(y, expected, atol=1e-6)
    assert torch.allclose(dx, x.grad, atol=1e-6)


def test_a_query_that_sees_no_key_has_no_probabilities() -> None:
    mask = torch.tensor([[1, 1], [0, 1]], dtype=torch.uint8)[None, None]
    y = softmax.scaled_masked_softmax_forward(drawn(1, 1, 2, 2), mask, 1.0)
    assert y[0, 0].tolist() == [[0.0, 0.0], [1.0, 0.0]]
