"""Weights on all holders: new ones from their owners, and equal ones before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.gradients.equal_weights import are_equal, equalise
from megatron_hetero.runtime.gradients.memory import TensorOf, data, main_grad, main_weight
from megatron_hetero.runtime.gradients.reduction import DividedReduction, Reduction
from megatron_hetero.runtime.gradients.room import RoomUnderWay
from megatron_hetero.runtime.gradients.sharding.parameter_gather import ParameterGather
from megatron_hetero.runtime.gradients.sharding.sharded_layers import ShardedLayers


class HeldWeights:
    """The weights of one rank's buckets.

    Args:
        model: the model chunks.
        plan: the plan.
        reductions: this rank's buckets, in the order of the backward pass.
        sharded: layers that the holders divide.
        room: memory for buckets under way.
        overlaps_gathers: new weights travel until the forward pass needs them.
        precisions: [rank] -> what it computes in; None: all in one.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        plan: Plan,
        reductions: Sequence[Reduction],
        sharded: ShardedLayers,
        room: RoomUnderWay,
        *,
        overlaps_gathers: bool,
        precisions: Sequence[Precision] | None,
    ) -> None:
        self._reductions, self._sharded, self._room = reductions, sharded, room
        self._precisions = precisions
        self._places = [
            (p.replica, p.stage, p.context_rank, p.tensor_rank) for p in rank_table(plan)
        ]
        self.under_way: ParameterGather | None = None
        if overlaps_gathers:
            forward = [(r.parameters, partial(r.gather, data)) for r in reversed(self.divided)]
            self.under_way = ParameterGather(model, forward)

    @property
    def divided(self) -> list[DividedReduction]:
        """Return the buckets with an optimizer state divided among the holders."""
        return [r for r in self._reductions if isinstance(r, DividedReduction)]

    def gather(self, tensor: TensorOf) -> None:
        """Send the owners' rows of `tensor` to all holders of divided buckets.

        These are weights after the optimizer's step, or gradients for code that reads all of them.
        """
        under_way: list[tuple[Reduction, Callable[[], None]]] = []
        # Each gather has a buffer: the oldest under way ends first where the next has no room.
        for reduction in self.divided:
            while not self._room.fits(reduction, [other for other, _ in under_way]):
                under_way.pop(0)[1]()
            under_way.append((reduction, reduction.gather(tensor)))
        for _, finish in under_way:
            finish()
        if tensor is main_grad:
            self._sharded.gather_gradients()

    def give(self) -> None:
        """Send the new weights from their owners to all holders, after the optimizer's step; those
        of sharded layers travel when they are used."""
        self._sharded.release()
        if self.under_way is not None:
            self.under_way.start()
        else:
            self.gather(data)

    def finish(self) -> None:
        """Have all weights whole; every rank calls it before reading them outside of the passes."""
        self.finish_under_way()
        self._sharded.make_whole()

    def finish_under_way(self) -> None:
        """Wait for new weights that still travel."""
        if self.under_way is not None:
            self.under_way.finish()

    @property
    def num_under_way(self) -> int:
        """Count the buckets whose new weights have not all arrived."""
        return 0 if self.under_way is None else self.under_way.num_under_way

    def equalise(self) -> None:
        """Give all holders of a slice the same weights, to the last bit (`equal_weights`)."""
        equalise((*self._reductions, *self._sharded.buckets), self._places, self._is_mixed)
        self._sharded.take_weights()

    def are_equal(self) -> bool:
        """Compare the weights of all slices over their holders.

        Every rank of the job takes part; each hears of its own buckets.
        """
        # Weights that are still under way would be compared half old, half new.
        self.finish()
        return are_equal((*self._reductions, *self._sharded.buckets))

    def take_main_weights(self, owned: Iterable[torch.nn.Parameter]) -> None:
        """Take the optimizer's pieces of the divided buckets, in order: holders of unlike
        precisions get the new weights from their main weights."""
        # The optimizer has a parameter for each owned piece, of divided buckets first, in order.
        tensors = iter(owned)
        for reduction in self.divided:
            own = [main_weight(next(tensors)) for _ in reduction.own_gradients]
            if self._is_mixed(dist.get_process_group_ranks(reduction.group)):
                reduction.main_weights = own

    def _is_mixed(self, holders: Iterable[int]) -> bool:
        """Tell if the holders of a bucket compute in unlike precisions."""
        if self._precisions is None:
            return False
        return len({self._precisions[rank] for rank in holders}) > 1
