"""Backward pass in two parts: gradients of the inputs now, those of the weights later.

While `WeightGradients.putting_off` is active, the backward pass of Megatron's column- and
row-parallel linear layers, the output layer included, computes only the gradient of its input and
keeps what the weight's gradient needs. `make` computes that later and adds it to `main_grad` as
Megatron's DDP does, in the order of the micro-batches, so that the sums have the same bits. Biases,
norms and embeddings, whose gradients cost little, stay in the first part. Zero-bubble schedules (Qi
et al. 2024) call the two parts B and W; orders of this package call them I and W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron_hetero.runtime.megatron import linear_backward


class Due(Protocol):
    """Work that makes weight gradients."""

    def make(self) -> None:
        """Compute and add the gradients."""


@dataclass(frozen=True)
class _PutOff:
    """Operands of a weight's gradient from a single micro-batch.

    `input` is the layer's own: under sequence parallelism its shard of the sequence, which is
    gathered again, as in Megatron's backward pass.
    """

    weight: torch.Tensor
    input: torch.Tensor
    output_gradient: torch.Tensor
    gather_group: dist.ProcessGroup | None
    is_fused: bool

    @torch.no_grad()
    def make(self) -> None:
        """Add the gradient to the weight's `main_grad`."""
        gathered = self.input
        if self.gather_group is not None:
            size = self.gather_group.size()
            gathered = gathered.new_empty((gathered.shape[0] * size, *gathered.shape[1:]))
            dist.all_gather_into_tensor(gathered, self.input.contiguous(), group=self.gather_group)
        # For the product: the gradient as [tokens, out], the input as [tokens, in].
        gradient, gathered = prepare_input_tensors_for_wgrad_compute(self.output_gradient, gathered)
        main_grad = self.weight.main_grad  # type: ignore[attr-defined]
        # Apex's kernels add the product to the buffer without a tensor for it.
        if self.is_fused:
            kernels = layers.fused_weight_gradient_mlp_cuda
            is_fp32 = main_grad.dtype == torch.float32
            add = kernels.wgrad_gemm_accum_fp32 if is_fp32 else kernels.wgrad_gemm_accum_fp16
            add(gathered, gradient, main_grad)
        else:
            main_grad.add_(gradient.t().matmul(gathered))


class WeightGradients:
    """Due weight gradients, by the backward pass of the inputs."""

    def __init__(self) -> None:
        self._due: dict[tuple[int, int], deque[Due]] = {}

    @contextmanager
    def putting_off(self, chunk: int, micro_batch: int) -> Iterator[None]:
        """Leave the weight gradients of backward passes inside to `make(chunk, micro_batch)`."""
        global _due_now
        _due_now = self._due.setdefault((chunk, micro_batch), deque())
        try:
            yield
        finally:
            _due_now = None

    def make(self, chunk: int, micro_batch: int) -> None:
        """Compute the weight gradients put off by a backward pass."""
        due = self._due.pop((chunk, micro_batch))
        while due:
            due.popleft().make()


_due_now: deque[Due] | None = None
"""Queue for weight gradients that are being put off; autograd fills it on threads of its own."""


def put_off(due: Due) -> bool:
    """Leave `due` to `WeightGradients.make`; return False if none are being put off."""
    if _due_now is None:
        return False
    _due_now.append(due)
    return True


def activate() -> None:
    """Let linear layers put off their weight gradients."""
    linear_backward.apply(_first_part)


def _first_part(ctx: Any, output_gradient: torch.Tensor) -> tuple[Any, ...] | None:
    """Compute the gradient of a linear layer's input, and put off the gradient of the weight.

    `ctx` is that of Megatron's `LinearWithGradAccumulationAndAsyncCommunication`. The gradient is
    summed over the tensor-parallel group; under sequence parallelism it is this rank's shard.
    Returns None if the whole backward pass is left to Megatron.
    """
    own_input, weight = ctx.saved_tensors
    group = ctx.tp_group
    gather_group = group if ctx.sequence_parallel else None
    is_fused = ctx.gradient_accumulation_fusion
    due = _PutOff(weight, own_input, output_gradient, gather_group, is_fused)
    if not ctx.needs_input_grad[1] or not put_off(due):
        return None
    gradient = output_gradient.matmul(weight)
    # Every rank had the whole input, so the parts of its gradient are summed.
    if ctx.allreduce_dgrad:
        dist.all_reduce(gradient, group=group)
    # Every rank had a part of the sequence: it gets that part of the sum.
    elif ctx.sequence_parallel:
        part = torch.empty_like(own_input)
        dist.reduce_scatter_tensor(part, gradient, group=group)
        gradient = part
    # The gradient of a bias costs little, and stays in the first part.
    bias = None
    if ctx.use_bias:
        bias = output_gradient.reshape(-1, output_gradient.shape[-1]).sum(dim=0)
    # The function's other inputs are settings.
    return (gradient, None, bias, *(None,) * (len(ctx.needs_input_grad) - 3))
