"""Errors planted between ranks: boundaries, the sum of gradients, new weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def drop_boundary_slice() -> None:
    """Replace the first piece of every message between stages by zeros."""
    from megatron_hetero.runtime.parallel.boundary import Boundary

    send_ops = Boundary.send_ops

    def broken(self: Boundary, tensor: torch.Tensor, sequence_parallel: bool) -> list[dist.P2POp]:
        ops = send_ops(self, tensor, sequence_parallel)
        ops[0].tensor = torch.zeros_like(ops[0].tensor)
        return ops

    Boundary.send_ops = broken  # type: ignore[method-assign]


def skip_slice() -> None:
    """Keep the gradient of the own replica in the first slice of every bucket."""
    from megatron_hetero.runtime.gradients.memory import main_grad
    from megatron_hetero.runtime.gradients.reduction import Reduction

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


def weight_by_micro_batch() -> None:
    """Weight replicas by micro-batches, each divided by the replica's own tokens."""
    from megatron_hetero.runtime.gradients.sync import GradientSync

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


def swap_boundary_halves() -> None:
    """Swap the two halves of every message that arrives."""
    from megatron_hetero.runtime.parallel.boundary import Arrival

    finish = Arrival.finish

    def broken(self: Arrival) -> torch.Tensor:
        whole = finish(self).detach().view(-1)
        first, second = whole.chunk(2)
        return torch.cat([second, first]).view(self.shape).requires_grad_()

    Arrival.finish = broken  # type: ignore[method-assign]


def round_boundary() -> None:
    """Convert activations and gradients to bf16 at a boundary."""
    from megatron_hetero.runtime.parallel.boundary import Boundary

    send_ops = Boundary.send_ops

    def broken(self: Boundary, tensor: torch.Tensor, sequence_parallel: bool) -> list[dist.P2POp]:
        return send_ops(self, tensor.to(torch.bfloat16).to(tensor.dtype), sequence_parallel)

    Boundary.send_ops = broken  # type: ignore[method-assign]


def weigh_a_replica_more() -> None:
    """Scale the first replica's gradients by 1.001."""
    from megatron_hetero.runtime.gradients.sync import GradientSync

    launch_next = GradientSync._launch_next

    def broken(self: GradientSync) -> None:
        weight = self._weight
        if self._groups.position.replica == 0:
            self._weight = weight * 1.001
        launch_next(self)
        self._weight = weight

    GradientSync._launch_next = broken  # type: ignore[method-assign]


def skip_bucket() -> None:
    """Skip the sum of a bucket: every holder keeps its own gradients."""
    _skip_buckets_of("decoder.layers.3.")


def skip_tied_embedding() -> None:
    """Skip the sum of the tied embedding: the first and the last stage keep their own gradients."""
    _skip_buckets_of("embedding.word_embeddings.")


def _skip_buckets_of(prefix: str) -> None:
    from megatron_hetero.runtime.gradients.memory import main_grad
    from megatron_hetero.runtime.gradients.reduction import Reduction

    start = Reduction._start

    def broken(self: Reduction, flat: torch.Tensor) -> Any:
        names = [piece.name for piece, _ in self.views.views(main_grad)]
        # A sum over nobody else: all holders of a bucket have the same names, so none waits.
        if any(name.startswith(prefix) for name in names):
            return dist.all_reduce(flat, group=_alone(), async_op=True)
        return start(self, flat)

    Reduction._start = broken  # type: ignore[method-assign]


def _alone() -> Any:
    from megatron_hetero.runtime.gradients import reduction

    if not hasattr(reduction, "planted_groups"):
        ranks = range(dist.get_world_size())
        reduction.planted_groups = [dist.new_group([rank]) for rank in ranks]  # type: ignore[attr-defined]
    return reduction.planted_groups[dist.get_rank()]  # type: ignore[attr-defined]


def keep_old_weights() -> None:
    """Keep the new weights of a bucket with a divided optimizer from all but the owners."""
    from megatron_hetero.runtime.gradients.memory import data
    from megatron_hetero.runtime.gradients.reduction import DividedReduction

    gather = DividedReduction.gather

    def broken(self: DividedReduction, tensor: Any) -> Any:
        names = [piece.name for piece, _ in self.views.views(tensor)]
        if tensor is data and any(name.startswith("decoder.layers.3.") for name in names):
            return lambda: None
        return gather(self, tensor)

    DividedReduction.gather = broken  # type: ignore[method-assign]
