"""Optimizers over lists of tensors against torch's own, step by step."""

from __future__ import annotations

import pytest
import torch

from megatron_hetero.runtime.transformer_engine.kernels import optimizers
from tests.runtime.transformer_engine.kernels.test_products import drawn

_NOOP = torch.zeros(1, dtype=torch.int32)
_LR, _BETAS, _EPS, _DECAY = 0.01, (0.9, 0.95), 1e-8, 0.1


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_adam_is_torchs(mode: int, kept: torch.dtype) -> None:
    """With weights in bf16 the main weights are torch's, and the weights are their rounding."""
    main = drawn(3, 4)
    other = main.clone().requires_grad_()
    kind = torch.optim.AdamW if mode else torch.optim.Adam
    theirs = kind([other], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY)
    weight = main.to(kept) if kept != torch.float32 else main
    m, v = torch.zeros(3, 4), torch.zeros(3, 4)
    for step in range(1, 5):
        gradient = drawn(3, 4, seed=step)
        other.grad = gradient.clone()
        theirs.step()
        lists = [[gradient], [weight], [m], [v]]
        optimizers.multi_tensor_adam(
            0, _NOOP, lists if weight is main else [*lists, [main]],
            _LR, *_BETAS, _EPS, step, mode, 1, _DECAY,
        )  # fmt: skip
        assert torch.allclose(main, other, atol=1e-6)
        assert torch.equal(weight, main.to(kept))
    state = theirs.state[other]
    assert torch.allclose(m, state["exp_avg"]) and torch.allclose(v, state["exp_avg_sq"])


def test_a_remainder_and_a_weight_in_bf16_are_a_weight_in_fp32() -> None:
    """Bit by bit what fp32 main weights are, whatever the sign of the remainder."""
    main = drawn(64, 8)
    bits = main.view(torch.int32)
    low = bits.to(torch.int16)
    weight = ((bits - low.int()) >> 16).to(torch.int16).view(torch.bfloat16)
    assert (low < 0).any() and (low > 0).any()
    moments = [torch.zeros(64, 8) for _ in range(4)]
    for step in range(1, 4):
        gradient = drawn(64, 8, seed=step)
        arguments = _LR, *_BETAS, _EPS, step, 1, 1, _DECAY
        optimizers.multi_tensor_adam(
            0, _NOOP, [[gradient], [main], [moments[0]], [moments[1]]], *arguments
        )
        optimizers.multi_tensor_adam_param_remainder(
            0, _NOOP, [[gradient], [weight], [moments[2]], [moments[3]], [low]], *arguments
        )
        whole = (weight.view(torch.int16).int() << 16) + low.int()
        assert torch.equal(whole.view(torch.float32), main)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("is_after", [False, True])
def test_sgd_is_torchs(nesterov: bool, is_after: bool) -> None:
    decay = 0.0 if is_after else _DECAY
    weight = drawn(3, 4)
    other = weight.clone().requires_grad_()
    theirs = torch.optim.SGD([other], lr=_LR, momentum=0.9, weight_decay=decay, nesterov=nesterov)
    momentum, copy = torch.zeros(3, 4), torch.empty(3, 4, dtype=torch.bfloat16)
    for step in range(3):
        gradient = drawn(3, 4, seed=step)
        other.grad = gradient.clone()
        theirs.step()
        optimizers.multi_tensor_sgd(
            0, _NOOP, [[gradient * 8], [weight], [momentum], [copy]],
            decay, 0.9, 0.0, _LR, nesterov, step == 0, is_after, 1 / 8,
        )  # fmt: skip
        assert torch.allclose(weight, other, atol=1e-6)
        assert torch.equal(copy, weight.bfloat16())


def test_the_decay_may_come_behind_the_momentum() -> None:
    weight = torch.ones(2)
    optimizers.multi_tensor_sgd(
        0, _NOOP, [[torch.zeros(2)], [weight], [torch.zeros(2)]],
        0.5, 0.9, 0.0, 0.1, False, True, True, 1.0,
    )  # fmt: skip
    assert torch.allclose(weight, torch.full((2,), 0.95))


def test_norms_and_scales() -> None:
    tensors = [drawn(3, 4), drawn(5, seed=1, dtype=torch.bfloat16)]
    flat = torch.cat([t.float().flatten() for t in tensors])
    total, each = optimizers.multi_tensor_l2norm(0, _NOOP, [tensors], True)
    assert torch.allclose(total, flat.norm().reshape(1))
    assert torch.allclose(each, torch.stack([t.float().norm() for t in tensors]))
    scaled, _ = optimizers.multi_tensor_unscale_l2norm(0, _NOOP, [tensors], torch.tensor([0.5]))
    assert torch.allclose(scaled, 0.5 * total)
    assert optimizers.multi_tensor_l2norm(0, _NOOP, [[]])[0].tolist() == [0.0]
    out = [torch.empty(3, 4, dtype=torch.bfloat16), torch.empty(5)]
    flag = torch.zeros(1, dtype=torch.int32)
    optimizers.multi_tensor_scale(0, flag, [tensors, out], 2.0)
    assert torch.equal(out[0], (tensors[0] * 2).bfloat16()) and not flag.any()
    tensors[1][0] = float("inf")
    optimizers.multi_tensor_scale_tensor(0, flag, [tensors, out], torch.tensor([2.0]))
    assert flag.item() == 1
