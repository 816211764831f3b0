"""A bucket of gradients with holders in several groups of machines.

They exchange it as `exchange.groups.by_group` plans it, in the rounds of `rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_hetero.cost.sync.room import num_copies
from megatron_hetero.exchange.groups.by_group import plan_by_group
from megatron_hetero.exchange.groups.pairs import pair_sums
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_machines
from megatron_hetero.runtime.gradients.buckets import Bucket
from megatron_hetero.runtime.gradients.groups.pair_group import PairGroup
from megatron_hetero.runtime.gradients.groups.rounds import HolderRounds, RoundsEngine
from megatron_hetero.runtime.gradients.memory import BucketViews, TensorOf
from megatron_hetero.runtime.gradients.reduction import DividedReduction, Reduction, scatter
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import Division
from megatron_hetero.runtime.parallel.traffic import RankTraffic


class GroupedExchange:
    """The exchanges of one rank's buckets by groups of machines.

    Args:
        machines: [rank] -> its machine.
        groups: names of machines (`Plan.exchange_groups`).
        uplinks: of these machines (`Plan.exchange_uplinks`).
    """

    def __init__(
        self,
        machines: Sequence[str],
        groups: Sequence[Sequence[str]],
        uplinks: Sequence[Sequence[int]] = (),
    ) -> None:
        self._machines, self._groups, self._uplinks = machines, groups, uplinks
        self._engine = RoundsEngine()
        self._plans: dict[tuple[object, ...], ExchangePlan] = {}
        self._known: dict[tuple[object, ...], HolderRounds] = {}
        self._pairs: dict[tuple[int, ...], PairGroup] = {}

    def use_pairs(self, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Use communicators of pairs (`summing_pairs`) of this rank, by their ranks; other sums go
        in rounds."""
        self._pairs = {ranks: PairGroup(group) for ranks, group in groups.items()}

    def crosses(self, bucket: Bucket) -> bool:
        """Tell if the holders of a bucket are in several groups."""
        return self._made(bucket.holders, len(self._groups), "all_reduce", None) is not None

    def pairs(self, bucket: Bucket, division: Division | None) -> frozenset[tuple[int, int]]:
        """Return the ranks, (sender, receiver), between which messages of a bucket's rounds go.

        Args:
            bucket: that crosses groups.
            division: owners of the elements to which it is reduced, and from which it is gathered;
                None: all holders get the sum.
        """
        # A divided bucket has two exchanges, each with messages of its own.
        purposes: tuple[Purpose, ...] = ("all_reduce",)
        if division is not None:
            purposes = ("reduce_scatter", "all_gather")
        # Each pair of ranks once, however many messages it has.
        return frozenset(
            (bucket.holders[source], bucket.holders[destination])
            for purpose in purposes
            for source, destination in np.unique(
                self.plan(bucket, bucket.num_elements, purpose, division).table[:, 1:3], axis=0
            ).tolist()
        )

    def _made(
        self,
        holders: Sequence[int],
        size: int,
        purpose: Purpose,
        owners: Sequence[Owned] | None,
    ) -> ExchangePlan | None:
        machines = [self._machines[rank] for rank in holders]
        return plan_by_group(machines, self._groups, size, purpose, owners, self._uplinks)

    def plan(
        self, bucket: Bucket, size: int, purpose: Purpose, division: Division | None = None
    ) -> ExchangePlan:
        """Return the plan of an exchange; arguments as of `start`, for `size` elements.

        Raises:
            ValueError: the holders are in one group of machines.
        """
        key = _kind(bucket, size, purpose, division)
        # Making and proving a plan takes time: each kind of exchange has it once.
        if key not in self._plans:
            owners = None if division is None else owners_of(division)
            plan = self._made(bucket.holders, size, purpose, owners)
            if plan is None:
                raise ValueError(f"ranks {bucket.holders} are in one group of machines")
            self._plans[key] = plan
        return self._plans[key]

    def start(
        self,
        bucket: Bucket,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        purpose: Purpose,
        division: Division | None = None,
    ) -> Any:
        """Start an exchange of a buffer in its place; return its work.

        Args:
            bucket: whose holders are `group`.
            flat: shape [elements].
            group: the holders.
            purpose: all-reduce, reduce-scatter or all-gather.
            division: owners of the elements; None where members own equal parts.
        """
        return self._engine.start(
            self._rounds(bucket, flat.numel(), group.rank(), purpose, division), flat, group
        )

    def _rounds(
        self, bucket: Bucket, size: int, rank: int, purpose: Purpose, division: Division | None
    ) -> HolderRounds:
        key = _kind(bucket, size, purpose, division)
        if key not in self._known:
            plan = self.plan(bucket, size, purpose, division)
            sums = pair_sums(plan).get(rank)
            ranks = () if sums is None else tuple(bucket.holders[holder] for holder in sums.holders)
            self._known[key] = HolderRounds(plan, rank, self._pairs.get(ranks))
        return self._known[key]


def _kind(
    bucket: Bucket, size: int, purpose: Purpose, division: Division | None
) -> tuple[object, ...]:
    """Return what exchanges of one plan have in common."""
    return bucket.holders, size, purpose, None if division is None else division.sizes


def exchange_of(plan: Plan) -> GroupedExchange | None:
    """Return the exchange of a plan with groups of machines; None without any."""
    if not plan.exchange_groups:
        return None
    return GroupedExchange(rank_machines(plan), plan.exchange_groups, plan.exchange_uplinks)


def owners_of(division: Division) -> list[Owned]:
    """Return the owned ranges of a divided bucket, with their owners."""
    spans = ((*division.span(holder), holder) for holder in range(len(division.sizes)))
    return [Owned(start, stop, holder) for start, stop, holder in spans if stop > start]


class GroupedReduction(Reduction):
    """All-reduce of one bucket, group by group."""

    def __init__(
        self,
        views: BucketViews,
        group: dist.ProcessGroup,
        copies: Sequence[tuple[int, int]],
        traffic: RankTraffic,
        ddp_config: Any,
        bucket: Bucket,
        exchange: GroupedExchange,
    ) -> None:
        super().__init__(views, group, copies, traffic, ddp_config)
        self.bucket = bucket
        self._exchange = exchange

    @property
    def num_copies(self) -> int:
        """Count one more than of a library's all-reduce: its rounds receive beside the bucket."""
        return num_copies(is_packed=not self.is_in_place, is_received=True)

    def _start(self, flat: torch.Tensor) -> Any:
        return self._exchange.start(self.bucket, flat, self.group, "all_reduce")


class GroupedDividedReduction(DividedReduction):
    """Reduce-scatter of a bucket to the owners of the optimizer state, group by group, and gather
    of the new weights."""

    def __init__(
        self,
        views: BucketViews,
        group: dist.ProcessGroup,
        copies: Sequence[tuple[int, int]],
        traffic: RankTraffic,
        ddp_config: Any,
        division: Division,
        bucket: Bucket,
        exchange: GroupedExchange,
    ) -> None:
        super().__init__(views, group, copies, traffic, ddp_config, division)
        self.bucket = bucket
        self._exchange = exchange

    def _start(self, flat: torch.Tensor) -> Any:
        return self._exchange.start(self.bucket, flat, self.group, "reduce_scatter", self.division)

    def _keep(self, flat: torch.Tensor) -> None:
        # The rounds have summed in place, so the own rows lie in the buffer.
        start, stop = self.division.span(self._own)
        scatter(flat[start:stop], self.own_gradients)

    def gather(self, tensor: TensorOf) -> Callable[[], None]:
        """Start to send all rows of `tensor` from their owners to every holder, as
        `DividedReduction.gather`."""
        flat = self._with_own_rows(tensor)
        work = self._exchange.start(self.bucket, flat, self.group, "all_gather", self.division)

        def finish() -> None:
            work.wait()
            self.views.unpack(flat, tensor)

        return finish
