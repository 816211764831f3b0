"""A bucket of gradients on a rank: all-reduced, or reduced to the owners of the optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_hetero.cost.sync.room import num_copies
from megatron_hetero.runtime.faults.unfinished import wait_for
from megatron_hetero.runtime.gradients.memory import (
    BucketViews,
    TensorOf,
    data,
    main_grad,
    main_weight,
)
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import Division, Rows
from megatron_hetero.runtime.parallel.traffic import RankTraffic


class Reduction:
    """All-reduce of one bucket: pack (where it is scattered in memory), weight, reduce, unpack.

    `copies` are ranges of the bucket that this rank leaves out of the sum, because another rank of
    its tensor-parallel group has an equal copy, which counts.
    """

    def __init__(
        self,
        views: BucketViews,
        group: dist.ProcessGroup,
        copies: Sequence[tuple[int, int]],
        traffic: RankTraffic,
        ddp_config: Any,
    ) -> None:
        self.views = views
        self.parameters = views.parameters
        self.group = group
        self._copies = copies
        self._traffic = traffic
        self._ddp_config = ddp_config
        self._in_place = views.in_place(main_grad)
        self._flat: torch.Tensor | None = None
        self._work: Any = None

    @property
    def is_in_place(self) -> bool:
        """Tell if the bucket is a range of Megatron's own gradient buffer."""
        return self._in_place is not None

    @property
    def num_copies(self) -> int:
        """Count the buffers, each of the bucket's size, that the exchange takes while under way
        beside the gradients."""
        return num_copies(is_packed=self._in_place is None, is_received=False)

    @property
    def is_under_way(self) -> bool:
        return self._work is not None

    def launch(self, weight: float) -> None:
        """Start the collective; gradients may not be touched until `finish`."""
        # Either a packed copy, or the range of Megatron's buffer that is the bucket.
        flat = self.views.pack(main_grad) if self._in_place is None else self._in_place
        check_gradients(flat, self._ddp_config)
        if weight != 1.0:
            flat.mul_(weight)
        # Copies that another rank counts add nothing.
        for start, stop in self._copies:
            flat[start:stop] = 0.0
        self._flat = flat
        self._traffic.count_reduced(flat, packed=self._in_place is None)
        self._work = self._start(flat)

    def finish(self) -> None:
        """Wait for the collective, and write the sum where the optimizer finds it."""
        if self._flat is not None:
            wait_for([self._work])
            self._keep(self._flat)
            self._flat = self._work = None

    def keep_weights(self, flat: torch.Tensor) -> None:
        """Write the weights of the bucket to the model and to the optimizer's copies."""
        self.views.unpack(flat, data)
        self.views.unpack(flat, main_weight)

    def _start(self, flat: torch.Tensor) -> Any:
        return dist.all_reduce(flat, group=self.group, async_op=True)

    def _keep(self, flat: torch.Tensor) -> None:
        if self._in_place is None:
            self.views.unpack(flat, main_grad)


class DividedReduction(Reduction):
    """Reduce-scatter of one bucket over uneven ranges: every holder gets the sum of its own rows.

    The ranges go straight from every holder to their owner, which adds them up in the order of the
    holders, in fp32: each element crosses once, and bf16 gradients are rounded once.
    """

    def __init__(
        self,
        views: BucketViews,
        group: dist.ProcessGroup,
        copies: Sequence[tuple[int, int]],
        traffic: RankTraffic,
        ddp_config: Any,
        division: Division,
    ) -> None:
        super().__init__(views, group, copies, traffic, ddp_config)
        self.division = division
        self._own = group.rank()
        self._received: Any = None
        self.main_weights: list[torch.Tensor] | None = None
        """The optimizer's copies of its own rows, where holders compute in unlike precisions."""
        self.own_gradients: list[torch.Tensor] = []
        self.loose_gradients: list[torch.Tensor] = []
        for _, view in self.own_views(main_grad):
            # A fused optimizer wants dense gradients; a window of a row-parallel weight is not.
            if view.is_contiguous():
                self.own_gradients.append(view)
            else:
                self.own_gradients.append(view.new_zeros(view.shape))
                self.loose_gradients.append(self.own_gradients[-1])

    @property
    def num_copies(self) -> int:
        return num_copies(is_packed=True, is_received=True)

    def own_views(self, tensor: TensorOf) -> Iterator[tuple[Rows, torch.Tensor]]:
        for rows in self.division.rows[self._own]:
            yield rows, self.views.rows(rows, tensor)

    def _start(self, flat: torch.Tensor) -> Any:
        # What arrives: [holder, own elements].
        size, num_holders = self.division.sizes[self._own], len(self.division.sizes)
        self._received = flat.new_empty(size * num_holders)
        return dist.all_to_all_single(
            self._received,
            flat,
            [size] * num_holders,
            list(self.division.sizes),
            group=self.group,
            async_op=True,
        )

    def _keep(self, flat: torch.Tensor) -> None:
        # The sum over the holders is taken in fp32, whatever type the gradients have.
        parts = self._received.view(len(self.division.sizes), -1)
        total = parts.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32))
        scatter(total, self.own_gradients)
        self._received = None

    def keep_weights(self, flat: torch.Tensor) -> None:
        self.views.unpack(flat, data)
        if self.main_weights is not None:
            start, stop = self.division.span(self._own)
            scatter(flat[start:stop], self.main_weights)

    def gather(self, tensor: TensorOf) -> Callable[[], None]:
        """Start to send all rows of `tensor` from their owners to every holder.

        Weights go as the optimizer has them, in fp32, to holders of unlike precisions.

        Returns:
            A function that waits for the rows and writes them to their places.
        """
        flat = self._with_own_rows(tensor)
        # Owners have unlike numbers of rows, so each owner broadcasts its range.
        works = []
        for holder, size in enumerate(self.division.sizes):
            start, stop = self.division.span(holder)
            if size:
                works.append(
                    dist.broadcast(
                        flat[start:stop], group=self.group, group_src=holder, async_op=True
                    )
                )

        def finish() -> None:
            wait_for(works)
            self.views.unpack(flat, tensor)

        return finish

    def _with_own_rows(self, tensor: TensorOf) -> torch.Tensor:
        """Return a buffer of the bucket with this holder's rows of `tensor` in their places."""
        (_, example), *_ = self.views.views(tensor)
        dtype = example.dtype
        # Sums, main weights, or weights: whatever the owner has of `tensor`.
        if tensor is main_grad:
            own = self.own_gradients
        elif self.main_weights is not None:
            own, dtype = self.main_weights, torch.float32
        else:
            own = [view for _, view in self.own_views(tensor)]
        flat = example.new_empty(sum(self.division.sizes), dtype=dtype)
        start, stop = self.division.span(self._own)
        if own:
            torch.cat([view.reshape(-1) for view in own], out=flat[start:stop])
        if tensor is data:
            self._traffic.count_gathered(flat)
        return flat


def scatter(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy the elements of a flat tensor into the targets, in order."""
    offset = 0
    for target in targets:
        target.copy_(flat[offset : offset + target.numel()].view(target.shape))
        offset += target.numel()


def check_gradients(gradients: torch.Tensor, ddp_config: Any) -> None:
    """Check gradients for NaN, infinite and unexpectedly large values, as Megatron's flags ask.

    The check comes before the sum over ranks, as in Megatron, so that the message names the rank at
    fault.
    """
    if ddp_config.check_for_nan_in_grad or ddp_config.check_for_large_grads:
        bucket = SimpleNamespace(grad_data=gradients)
        _ParamAndGradBucketGroup.check_grads(
            SimpleNamespace(buckets=[bucket]),
            check_for_nan_or_inf=ddp_config.check_for_nan_in_grad,
            check_for_large=ddp_config.check_for_large_grads,
        )
