"""Exchange of gradients and new weights on one rank of a rehearsal.

The hooks are on the calls that start it: our buckets (`runtime.gradients.reduction`), stock
Megatron's bucket groups, and the report of every complete gradient (`--overlap-grad-reduce`). A
gradient is complete when the stretched backward pass has reached it; its bucket counts with the
bytes of the real model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_hetero.lab.rehearse.clock import Clock, sleep_until
from megatron_hetero.lab.rehearse.links.transport import Transport
from megatron_hetero.lab.rehearse.small import SmallModel
from megatron_hetero.runtime.gradients.memory import BucketViews, data, main_grad
from megatron_hetero.runtime.parallel.shards import global_parameters
from megatron_hetero.schedule.exchange.early import LastBackward


class Pass(NamedTuple):
    """A computation under way.

    It begins at `begin_s` of this machine's time and takes `seconds` of the cluster's.
    """

    kind: str
    chunk: int
    begin_s: Callable[[], float]
    seconds: float


class GradientHooks:
    """Hooks of one rank.

    `last_backward` describes the last backward pass of a first stage, in the cluster's seconds.
    """

    def __init__(
        self,
        small: SmallModel,
        transport: Transport,
        clock: Clock,
        tensor_ranks: set[int],
        last_backward: LastBackward | None,
    ) -> None:
        self._small, self._transport, self._clock = small, transport, clock
        self._tensor_ranks = tensor_ranks
        self._last_backward = last_backward
        self._names: dict[torch.nn.Parameter, str] = {}
        self.under_way: Pass | None = None

    def know(self, model: Iterable[torch.nn.Module]) -> None:
        """Store the names of this rank's parameters, from which follow the real gradients' sizes.
        """
        self._names = {parameter: name for name, parameter in global_parameters(model)}

    def install(self) -> None:
        """Put all hooks in their places, in this process."""
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

        from megatron_hetero.runtime.gradients import buckets as gradient_buckets
        from megatron_hetero.runtime.gradients import sync as gradients
        from megatron_hetero.runtime.gradients.groups.grouped import (
            GroupedDividedReduction,
            GroupedExchange,
            GroupedReduction,
        )
        from megatron_hetero.runtime.gradients.reduction import DividedReduction, Reduction

        self._transport.gradient_bytes = self._gradient_bytes
        # Reductions of our buckets, whole and divided, flat and by groups.
        for reduction in (Reduction, DividedReduction, GroupedReduction, GroupedDividedReduction):
            reduction._start = self._starting(reduction._start)
        for divided in (DividedReduction, GroupedDividedReduction):
            divided.gather = self._gathering(divided.gather)
        GroupedExchange.start = self._transport.held_rounds(GroupedExchange.start)
        gradient_buckets._pieces = self._measuring(gradient_buckets._pieces)
        # The report of a complete gradient, in stock Megatron and in our runtime.
        for group in (_ParamAndGradBucketGroup, gradients.ChunkGradients):
            group.register_grad_ready = self._readying(group.register_grad_ready)
        # Stock Megatron's exchanges of gradients and of new weights.
        stock = _ParamAndGradBucketGroup
        stock.start_grad_sync = self._syncing(stock.start_grad_sync)
        stock.start_param_sync = self._sharing(stock.start_param_sync)

    # Our runtime.

    def _measuring(self, pieces: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the measure of slices to count real sizes, for buckets as in the real job."""

        def held(*args: Any) -> Iterator[Any]:
            for piece in pieces(*args):
                size = self._small.real_elements(piece.slice.name, piece.size)
                yield replace(piece, size=size)

        return held

    def _starting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def held(reduction: Any, flat: torch.Tensor) -> Any:
            # Real bytes for each element of the small flat buffer.
            each = self._bytes_of(reduction.views) / flat.numel()
            with self._transport.exchanging("gradient_sync", each):
                return start(reduction, flat)

        return held

    def _gathering(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        def held(reduction: Any, tensor: Any) -> Any:
            # Gathers of anything but new weights stay as they are.
            if tensor is not data:
                return gather(reduction, tensor)
            num_bytes = self._bytes_of(reduction.views) * self._small.weight_ratio
            each = num_bytes / sum(reduction.division.sizes)
            with self._transport.exchanging("weight_sync", each):
                return gather(reduction, tensor)

        return held

    def _bytes_of(self, views: BucketViews) -> float:
        return sum(
            view.numel() * self._small.gradient_bytes(piece.name)
            for piece, view in views.views(main_grad)
        )

    # Both.

    def _readying(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def held(group: Any, parameter: torch.nn.Parameter, *args: Any, **kwargs: Any) -> Any:
            # Only the last micro-batch of a step completes a gradient.
            if group.is_last_microbatch and self._clock.scale:
                self._reach(self._names[parameter])
            return register(group, parameter, *args, **kwargs)

        return held

    def _reach(self, name: str) -> None:
        """Wait until the backward pass has completed the gradient of a parameter."""
        under_way, last = self.under_way, self._last_backward
        if last is None or under_way is None or under_way.kind != "backward":
            return
        # The gradient of this layer is complete `early_s` before the pass ends, in its last chunk.
        final = last.final(self._small.real_layer(name))
        if final.chunk != under_way.chunk:
            return
        seconds = under_way.seconds - final.early_s
        at_s = under_way.begin_s() + seconds * self._clock.scale
        sleep_until(at_s)
        self._clock.reach(self._clock.at(at_s))

    # Stock Megatron.

    def _gradient_bytes(self, ranks: tuple[int, ...], num_elements: int) -> float:
        """Return the real bytes of an all-reduce outside buckets: a norm or tied embeddings."""
        # Within a TP group it is a norm's gradient, across replicas or stages the tied embedding.
        is_inside = set(ranks) <= self._tensor_ranks
        name = "decoder.final_layernorm.weight" if is_inside else "embedding.word_embeddings.weight"
        return num_elements * self._small.gradient_bytes(name)

    def _syncing(self, start_grad_sync: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the all-reduce or reduce-scatter of a bucket."""

        def held(group: Any, *args: Any, **kwargs: Any) -> Any:
            process_group = _group_of(group)
            ranks = dist.get_process_group_ranks(process_group)
            # Without ranks to exchange with, in a free step, or started before: as it is.
            is_under_way = group.grad_reduce_handle is not None
            if len(ranks) == 1 or self._clock.scale == 0 or is_under_way:
                return start_grad_sync(group, *args, **kwargs)
            network, num_bytes = self._transport.network, self._bytes_of_group(group)
            divided = group.ddp_config.use_distributed_optimizer
            # ZeRO-1 reduce-scatters, otherwise the bucket is all-reduced.
            make_ring = network.one_pass if divided else network.all_reduce
            overlaps = group.ddp_config.overlap_grad_reduce
            start = partial(start_grad_sync, group, *args, **kwargs)

            def real(is_async: bool) -> Any:
                with self._transport.left_alone():
                    start()
                return group.grad_reduce_handle

            work = self._transport.hold(
                process_group, make_ring(ranks, num_bytes), real, overlaps, "gradient_sync"
            )
            # Megatron's `finish_grad_sync` waits for this handle.
            if overlaps:
                group.grad_reduce_handle = work
            return None

        return held

    def _sharing(self, start_param_sync: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the all-gather of new weights that is not overlapped."""

        def held(group: Any, *args: Any, **kwargs: Any) -> Any:
            process_group = _group_of(group)
            ranks = dist.get_process_group_ranks(process_group)
            if len(ranks) == 1 or self._clock.scale == 0:
                return start_param_sync(group, *args, **kwargs)
            start = partial(start_param_sync, group, *args, **kwargs)

            def real(is_async: bool) -> Any:
                with self._transport.left_alone():
                    return start()

            num_bytes = self._bytes_of_group(group) * self._small.weight_ratio
            ring = self._transport.network.one_pass(ranks, num_bytes)
            return self._transport.hold(process_group, ring, real, False, "weight_sync")

        return held

    def _bytes_of_group(self, group: Any) -> float:
        return sum(
            parameter.numel() * self._small.gradient_bytes(self._names[parameter])
            for parameter in group.params
        )


def _group_of(group: Any) -> Any:
    if group.ddp_config.use_distributed_optimizer:
        return group.intra_distributed_optimizer_instance_group
    return group.data_parallel_group
