"""Optimizers and norms over lists of tensors (`multi_tensor_*`).

A list of lists has one list for each kind of tensor, in the order of each function's text. All
compute in fp32 and round what they write once.

Source: Transformer Engine, `common/multi_tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.runtime.transformer_engine.kernels.widths import wide

_Lists = Sequence[Sequence[Tensor]]


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, lists: _Lists, scale: float) -> None:
    """Write `scale` times each input.

    Args:
        chunk_size: elements of a GPU's block.
        noop_flag: [1], set to 1 if an input or a result is no finite number.
        lists: inputs, outputs.
        scale: the factor.
    """
    for source, target in zip(*lists, strict=True):
        scaled = wide(source) * scale
        # The flag tells the caller that this step is no good.
        if not bool(torch.isfinite(scaled).all()):
            noop_flag.fill_(1)
        target.copy_(scaled)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, lists: _Lists, scale: Tensor
) -> None:
    """Do as `multi_tensor_scale`, with the factor in a tensor.

    Args:
        chunk_size: as there.
        noop_flag: as there.
        lists: as there.
        scale: [1].
    """
    multi_tensor_scale(chunk_size, noop_flag, lists, float(scale))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: _Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the L2 norm `[1]` of all tensors together, and those of each if `per_tensor`.

    Args:
        chunk_size: elements of a GPU's block.
        noop_flag: left alone.
        lists: tensors.
        per_tensor: return the norm of each tensor too.
    """
    return multi_tensor_unscale_l2norm(chunk_size, noop_flag, lists, torch.ones(1), per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: _Lists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Do as `multi_tensor_l2norm`, of tensors times `inv_scale`.

    Args:
        chunk_size: as there.
        noop_flag: as there.
        lists: as there.
        inv_scale: [1].
        per_tensor: as there.
    """
    norms = [wide(t).norm() for t in lists[0]]
    each = torch.stack(norms) * inv_scale if norms else torch.zeros(0)
    return each.norm().reshape(1), each if per_tensor else torch.zeros(0)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take a step of Adam.

    Args:
        chunk_size: elements of a GPU's block.
        noop_flag: left alone.
        lists: gradients, weights, first moments, second moments and, if there are any, main
            weights, of which the weights are then copies.
        lr: learning rate.
        beta1: decay of the first moments.
        beta2: decay of the second moments.
        epsilon: added to the root of the second moments.
        step: number of this step, from 1.
        mode: 0 adds the decay of weights to gradients; 1 (AdamW) to the update.
        bias_correction: whether moments are corrected for their start at 0.
        weight_decay: the decay.
    """
    gradients, weights, firsts, seconds, *masters = lists
    # Without main weights the weights themselves are the exact ones.
    mains = masters[0] if masters else weights
    settings = lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
    for g, w, m, v, main in zip(gradients, weights, firsts, seconds, mains, strict=True):
        updated = _adam(wide(g), wide(main), m, v, settings)
        main.copy_(updated)
        if main is not w:
            w.copy_(updated)


def _adam(g: Tensor, w: Tensor, m: Tensor, v: Tensor, settings: Sequence[Any]) -> Tensor:
    """Return the new weights; the moments are written in place."""
    lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay = settings
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    if mode == 0:
        g = g + weight_decay * w
    first = beta1 * wide(m) + (1 - beta1) * g
    second = beta2 * wide(v) + (1 - beta2) * g * g
    m.copy_(first)
    v.copy_(second)
    update = (first / correction1) / ((second / correction2).sqrt() + epsilon)
    if mode == 1:
        update = update + weight_decay * w
    return w - lr * update


def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: Tensor,
    lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take a step of Adam on bf16 weights, each kept with the remainder of the fp32 weight.

    The bits of the fp32 weight are those of the bf16 weight, shifted by 16, plus the remainder,
    which is a signed number of 16 bits.

    Args:
        chunk_size: as in `multi_tensor_adam`.
        noop_flag: as there.
        lists: gradients, weights in bf16, first and second moments, remainders in int16.
        lr: as there.
        beta1: as there.
        beta2: as there.
        epsilon: as there.
        step: as there.
        mode: as there.
        bias_correction: as there.
        weight_decay: as there.
    """
    settings = lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
    for g, w, m, v, rest in zip(*lists, strict=True):
        bits = (w.view(torch.int16).int() << 16) + rest.int()
        updated = _adam(wide(g), bits.view(torch.float32), m, v, settings).view(torch.int32)
        # The low 16 bits, read as a signed number; the high ones are what is left without them.
        low = updated.to(torch.int16)
        rest.copy_(low)
        w.view(torch.int16).copy_(((updated - low.int()) >> 16).to(torch.int16))


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    lists: _Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Take a step of SGD.

    Args:
        chunk_size: elements of a GPU's block.
        noop_flag: left alone.
        lists: gradients, weights, momenta and, if there are any, copies of the weights.
        weight_decay: decay of weights, added to gradients.
        momentum: decay of momenta.
        dampening: part of a gradient that momenta leave out.
        lr: learning rate.
        nesterov: whether the step looks ahead.
        first_run: momenta begin as the gradients.
        wd_after_momentum: the decay is added behind the momentum.
        scale: factor of the gradients.
    """
    gradients, weights, momenta, *others = lists
    for i, (g, w, kept) in enumerate(zip(gradients, weights, momenta, strict=True)):
        old = wide(w)
        d = wide(g) * scale
        if not wd_after_momentum:
            d = d + weight_decay * old
        if momentum:
            moment = d if first_run else momentum * wide(kept) + (1 - dampening) * d
            kept.copy_(moment)
            d = d + momentum * moment if nesterov else moment
        if wd_after_momentum:
            d = d + weight_decay * old
        w.copy_(old - lr * d)
        for copies in others:
            copies[i].copy_(w)
