"""Errors planted on purpose: a check that cannot fail proves nothing.

Each one breaks a single thing in the runtime of the calling process, the way a real defect would,
and must make `verify` fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.errors import UsageError


def plant(name: str) -> None:
    """Break the runtime in this process, before training starts."""
    FAULTS[name]()


def check_fault(name: str) -> None:
    """Refuse a name that is not in `FAULTS`.

    Raises:
        UsageError: there is no such error to plant.
    """
    if name not in FAULTS:
        raise UsageError(f"--plant {name}: choose one of {', '.join(FAULTS)}")


def _drop_boundary_slice() -> None:
    """The first piece of every message between stages arrives as zeros."""
    from megatron_hetero.runtime.boundary import Boundary

    send_ops = Boundary.send_ops

    def broken(self: Boundary, tensor: torch.Tensor, sequence_parallel: bool) -> list[dist.P2POp]:
        ops = send_ops(self, tensor, sequence_parallel)
        ops[0].tensor = torch.zeros_like(ops[0].tensor)
        return ops

    Boundary.send_ops = broken  # type: ignore[method-assign]


def _skip_slice() -> None:
    """The first slice of every bucket keeps the gradient of its own replica."""
    from megatron_hetero.runtime.gradient_memory import main_grad
    from megatron_hetero.runtime.gradient_reduction import Reduction

    launch, finish = Reduction.launch, Reduction.finish
    kept: dict[Reduction, torch.Tensor] = {}

    def launch_and_keep(self: Reduction, weight: float) -> None:
        _, view = next(self.views.views(main_grad))
        kept[self] = view * weight
        launch(self, weight)

    def broken(self: Reduction) -> None:
        finish(self)
        if self in kept:
            _, view = next(self.views.views(main_grad))
            view.copy_(kept.pop(self))

    Reduction.launch = launch_and_keep  # type: ignore[method-assign]
    Reduction.finish = broken  # type: ignore[method-assign]


def _weight_by_micro_batch() -> None:
    """Each replica divides by its own tokens, and replicas count by their micro-batches."""
    from megatron_hetero.runtime.gradients import GradientSync

    def broken(
        self: GradientSync, model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        weight, self._weight = self._weight, 1.0
        mean_weight = self._counts[self._groups.position.replica] / sum(self._counts)
        if num_tokens is not None:
            replica = self._groups.position.replica
            tokens = torch.zeros(dist.get_world_size(), dtype=torch.int64)
            if self._groups.is_last_stage and self._groups.tensor.rank() == 0:
                tokens[replica] = num_tokens
            dist.all_reduce(tokens)
            self.scale(model, mean_weight / int(tokens[replica]))
        else:
            self.scale(model, weight)
        self.reduce()
        self._weight = weight

    GradientSync.finalize = broken  # type: ignore[method-assign]


def _count_shard_twice() -> None:
    """The norm counts the first parameter of the last replica as well."""
    from megatron_hetero.runtime import model_hooks

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


def _move_sample() -> None:
    """The first replica reads one sample of the next global batch instead of its own first."""
    from megatron_hetero.runtime.data import ReplicaSampler

    batches = ReplicaSampler.__iter__

    def broken(self: ReplicaSampler) -> Iterator[list[int]]:
        for number, batch in enumerate(batches(self)):
            if number == 0 and self.replica == 0:
                batch = [batch[0] + self.global_batch_size, *batch[1:]]
            yield batch

    ReplicaSampler.__iter__ = broken  # type: ignore[method-assign]


def _draw_alone() -> None:
    """The rank that reads data draws a number from the state that its group shares."""
    from megatron_hetero.runtime import gpt

    batch = gpt._batch

    def broken(data_iterator: Any, *args: Any) -> Any:
        from megatron.core import mpu

        if mpu.get_tensor_model_parallel_rank() == 0:
            torch.rand(1, device="cuda")
        return batch(data_iterator, *args)

    gpt._batch = broken  # type: ignore[assignment]


FAULTS: dict[str, Callable[[], None]] = {
    "boundary-slice-dropped": _drop_boundary_slice,
    "slice-not-reduced": _skip_slice,
    "weighted-by-micro-batch": _weight_by_micro_batch,
    "shard-counted-twice": _count_shard_twice,
    "sample-moved": _move_sample,
    "random-number-drawn-alone": _draw_alone,
}
