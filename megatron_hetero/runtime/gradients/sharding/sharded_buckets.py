"""Slices of a sharded layer with the same holders: weights gathered, gradients sent to owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.runtime.faults.unfinished import wait_for
from megatron_hetero.runtime.gradients.memory import BucketViews, data, main_grad
from megatron_hetero.runtime.gradients.reduction import check_gradients
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import Division, Rows
from megatron_hetero.runtime.parallel.traffic import RankTraffic


@dataclass(frozen=True)
class Sent:
    """Gradients on their way to the owners: `flat` leaves this rank, `received` arrives."""

    flat: torch.Tensor
    received: torch.Tensor
    work: Any


class ShardedBucket:
    """Slices of a sharded layer with the same holders, and the rows owned by this rank.

    Args:
        views: the slices on this rank.
        group: the holders.
        copies: ranges that this rank leaves out of the sum of gradients, as in `Reduction`.
        division: of the bucket among the holders.
        traffic: of this rank.
        ddp_config: Megatron's configuration of DDP.
    """

    def __init__(
        self,
        views: BucketViews,
        group: dist.ProcessGroup,
        copies: Sequence[tuple[int, int]],
        division: Division,
        traffic: RankTraffic,
        ddp_config: Any,
    ) -> None:
        self.views, self.group, self.division = views, group, division
        self._copies, self._traffic, self._ddp_config = copies, traffic, ddp_config
        self._own = group.rank()
        size = division.sizes[self._own]
        (_, example), *_ = views.views(data)
        self._is_fp32 = ddp_config.grad_reduce_in_fp32
        # Owned rows of the weights, and sums of their gradients: flat, row after row.
        self._weights = example.new_empty(size)
        self.gradients = example.new_zeros(size, dtype=self.gradient_type(example.dtype))
        self._whole: torch.Tensor | None = None

    def gradient_type(self, weight_type: torch.dtype) -> torch.dtype:
        """Return the type in which gradients are added up, as in Megatron's buffers."""
        return torch.float32 if self._is_fp32 else weight_type

    def arrange(self) -> None:
        """Find the bucket in the layer's memory, and take over the owned rows."""
        self._whole = self.views.in_place(data)
        self.take_weights()

    def take_weights(self) -> None:
        """Copy the owned rows out of the whole weights."""
        for (_, view), (_, kept) in zip(
            self._owned_views(), self._kept(self._weights), strict=True
        ):
            kept.copy_(view)

    def pieces(self) -> Iterator[tuple[Rows, torch.nn.Parameter, torch.Tensor, torch.Tensor]]:
        """Yield the owned rows: with their parameter, their weights and their gradients."""
        gradients = self._kept(self.gradients)
        for (rows, weights), (_, gradient) in zip(
            self._kept(self._weights), gradients, strict=True
        ):
            yield rows, self.views.parameter(rows), weights, gradient

    def gather_weights(self) -> Callable[[], None]:
        """Start to gather the weights into the layer's memory; return what waits for them."""
        return self._gather(self._weights, self._whole, data)

    def gather_gradients(self) -> None:
        """Gather the reduced gradients into `main_grad`, for readers of all gradients."""
        self._gather(self.gradients, None, main_grad)()

    def _gather(
        self, own: torch.Tensor, whole: torch.Tensor | None, tensor: Callable[..., torch.Tensor]
    ) -> Callable[[], None]:
        # Without a range of the layer's memory a buffer takes the whole bucket.
        flat = own.new_empty(sum(self.division.sizes)) if whole is None else whole
        works = []
        for holder, size in enumerate(self.division.sizes):
            if not size:
                continue
            start, stop = self.division.span(holder)
            part = flat[start:stop]
            # The owner's rows are broadcast from their place in the whole.
            if holder == self._own:
                part.copy_(own)
            works.append(dist.broadcast(part, group=self.group, group_src=holder, async_op=True))
        self._traffic.count_sharded(flat)

        def finish() -> None:
            wait_for(works)
            if whole is None:
                self.views.unpack(flat, tensor)

        return finish

    def send(self, weight: float, gradients: torch.Tensor | None) -> Sent:
        """Start to send the gradients of one micro-batch of every holder to the owners.

        Args:
            weight: of this rank's gradients.
            gradients: of the layer, in the order of its memory; None where this rank has no
                micro-batch left.
        """
        # No micro-batch is left here: zeros keep the exchange of the others going.
        if gradients is None:
            flat = self.gradients.new_zeros(sum(self.division.sizes))
        elif self._whole is None:
            flat = self.views.pack(main_grad)
        else:
            # The bucket is a range of the layer's flat weights, and so of its flat gradients.
            start = self._whole.storage_offset()
            flat = gradients[start : start + self._whole.numel()]
        check_gradients(flat, self._ddp_config)
        if weight != 1.0:
            flat.mul_(weight)
        for start, stop in self._copies:
            flat[start:stop] = 0.0
        # What arrives: [holder, own elements].
        size, num_holders = self.division.sizes[self._own], len(self.division.sizes)
        received = flat.new_empty(size * num_holders)
        sizes = [size] * num_holders, list(self.division.sizes)
        work = dist.all_to_all_single(received, flat, *sizes, group=self.group, async_op=True)
        self._traffic.count_sharded(flat)
        return Sent(flat, received, work)

    def add(self, sent: Sent) -> None:
        """Wait for what was sent, and add it up."""
        wait_for([sent.work])
        total = self.gradients.float()  # itself where gradients are in fp32
        for part in sent.received.view(len(self.division.sizes), -1):
            total.add_(part)
        if total is not self.gradients:
            self.gradients.copy_(total)

    def _owned_views(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        for rows in self.division.rows[self._own]:
            yield rows, self.views.rows(rows, data)

    def _kept(self, flat: torch.Tensor) -> Iterator[tuple[Rows, torch.Tensor]]:
        offset = 0
        for rows, view in self._owned_views():
            yield rows, flat[offset : offset + view.numel()].view(view.shape)
            offset += view.numel()
