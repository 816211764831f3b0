"""GELU and its kind, each forward and backward, plain and gated.

`gelu`, `dgelu` and so on are made from a table. A gated function multiplies f of the first half of
the columns by the second half.

Source: Transformer Engine, `common/util/math.h` and `common/activation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_hetero.runtime.transformer_engine.kernels.float8 import in_fp8
from megatron_hetero.runtime.transformer_engine.kernels.widths import wide

_Function = Callable[[Tensor], Tensor]


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x) ** 2


PLAIN: dict[str, _Function] = {
    "gelu": _gelu,
    "qgelu": _quick_gelu,
    "relu": functional.relu,
    "srelu": _squared_relu,
    "silu": functional.silu,
}
GATED: dict[str, _Function] = {
    "glu": torch.sigmoid,
    "geglu": _gelu,
    "qgeglu": _quick_gelu,
    "reglu": functional.relu,
    "sreglu": _squared_relu,
    "swiglu": functional.silu,
}


def _whole(function: _Function, is_gated: bool) -> _Function:
    if not is_gated:
        return function

    def gated(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return function(gate) * value

    return gated


def _pair(name: str, function: _Function) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def forward(x: Tensor, quantizer: Any = None) -> Tensor:
        return in_fp8(function(wide(x)).to(x.dtype), quantizer, name)

    def backward(dy: Tensor, x: Tensor, quantizer: Any = None) -> Tensor:
        # Autograd derives the function, in the width of the forward pass.
        point = wide(x).detach().requires_grad_()
        with torch.enable_grad():
            value = function(point)
        (gradient,) = torch.autograd.grad(value, point, wide(dy).reshape(value.shape))
        return in_fp8(gradient.to(x.dtype), quantizer, f"d{name}")

    return forward, backward


def functions() -> dict[str, Callable[..., Tensor]]:
    """Return every activation by its name in the compiled part, and each derivative by `d` + name.
    """
    found: dict[str, Callable[..., Tensor]] = {}
    for is_gated, table in ((False, PLAIN), (True, GATED)):
        for name, function in table.items():
            found[name], found[f"d{name}"] = _pair(name, _whole(function, is_gated))
    return found
