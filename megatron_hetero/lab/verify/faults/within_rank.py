"""Errors planted in the part of a single rank: samples, losses, norm, start and update."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def count_shard_twice() -> None:
    """Count the first parameter of the last replica in the norm as well."""
    from megatron_hetero.runtime.model import hooks as model_hooks

    synchronise_hook = model_hooks.synchronise_hook

    def broken(*args: Any, **kwargs: Any) -> Callable[[list[Any]], list[Any]]:
        hook = synchronise_hook(*args, **kwargs)

        def wrapped(model: list[Any]) -> list[Any]:
            model = hook(model)
            parameters: Iterator[Any] = model[0].parameters()
            first = next(parameters)
            first.shared = False
            first.tensor_model_parallel = True
            return model

        return wrapped

    model_hooks.synchronise_hook = broken


def move_sample() -> None:
    """Read one sample of the next global batch instead of the first replica's own first sample."""
    from megatron_hetero.runtime.model.samples.data import ReplicaSampler

    batches = ReplicaSampler.__iter__

    def broken(self: ReplicaSampler) -> Iterator[list[int]]:
        for number, batch in enumerate(batches(self)):
            if number == 0 and self.replica == 0:
                batch = [batch[0] + self.global_batch_size, *batch[1:]]
            yield batch

    ReplicaSampler.__iter__ = broken  # type: ignore[method-assign]


def draw_alone() -> None:
    """Draw a number from the group's shared state, only on the rank that reads data."""
    from megatron_hetero.runtime.model import gpt

    batch = gpt._batch

    def broken(data_iterator: Any, *args: Any) -> Any:
        from megatron.core import mpu

        if mpu.get_tensor_model_parallel_rank() == 0:
            torch.rand(1, device="cuda")
        return batch(data_iterator, *args)

    gpt._batch = broken  # type: ignore[assignment]


def read_micro_batch_twice() -> None:
    """Read the first micro-batch of the first replica again in the place of the second."""
    from megatron_hetero.runtime.model.samples.data import ReplicaSampler

    batches = ReplicaSampler.__iter__

    def broken(self: ReplicaSampler) -> Iterator[list[int]]:
        first: list[int] = []
        for number, batch in enumerate(batches(self)):
            first = batch if number == 0 else first
            yield first if number == 1 and self.replica == 0 else batch

    ReplicaSampler.__iter__ = broken  # type: ignore[method-assign]


def shift_samples() -> None:
    """Shift the samples of all replicas by one."""
    from megatron_hetero.runtime.model.samples.data import ReplicaSampler

    batches = ReplicaSampler.__iter__

    def broken(self: ReplicaSampler) -> Iterator[list[int]]:
        for batch in batches(self):
            yield [index + 1 for index in batch]

    ReplicaSampler.__iter__ = broken  # type: ignore[method-assign]


def count_masked_tokens() -> None:
    """Count tokens in the loss that the mask takes out."""
    from megatron_hetero.runtime.model import gpt

    loss_func = gpt.loss_func

    def broken(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        return loss_func(torch.ones_like(loss_mask), output)

    gpt.loss_func = broken  # type: ignore[assignment]


def start_apart() -> None:
    """Draw the last rank's weights from another seed, and never make them equal."""
    from megatron_hetero.runtime.gradients.weights import HeldWeights
    from megatron_hetero.runtime.model import hooks

    initialise = hooks.initialise

    def broken(model: Any, seed: int) -> None:
        initialise(model, seed + _is_last_rank())

    hooks.initialise = broken
    HeldWeights.equalise = lambda self: None  # type: ignore[method-assign]


def learn_faster_on_one_rank() -> None:
    """Scale the last rank's learning rate by 1.001."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    get_lr = OptimizerParamScheduler.get_lr

    def broken(self: Any, group: Any) -> float:
        return float(get_lr(self, group)) * (1 + 0.001 * _is_last_rank())

    OptimizerParamScheduler.get_lr = broken


def forget_the_clip() -> None:
    """Skip the clipping of the last rank's gradients."""
    from megatron.core.optimizer import optimizer

    clip = optimizer.clip_grad_by_total_norm_fp32

    def broken(*args: Any, **named: Any) -> None:
        if not _is_last_rank():
            clip(*args, **named)

    optimizer.clip_grad_by_total_norm_fp32 = broken


def _is_last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
