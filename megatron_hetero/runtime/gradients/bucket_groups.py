"""Process groups in which buckets of gradients are exchanged.

Every rank makes all groups of the job, one for each set of holders, in the order of the buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_hetero.cost.sync.communicators import summing_pairs
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.gradients.buckets import Bucket
from megatron_hetero.runtime.gradients.groups.grouped import GroupedExchange
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import division_by_rank
from megatron_hetero.runtime.parallel.connecting import (
    ALL_TO_ALL,
    COLLECTIVES,
    Connections,
    make_group,
)
from megatron_hetero.runtime.parallel.shards import ParameterShard

BucketGroup = tuple[Bucket, dist.ProcessGroup]


class BucketGroups:
    """Groups of a job's buckets, and which buckets this rank holds.  Its making is collective.

    Args:
        plan: the job's plan.
        buckets: of all ranks, in their order.
        shards: of this rank, by the parameter's name.
        exchange: by groups of machines, if the plan has them.
        optimizer_weights: [rank] -> relative part of the optimizer's state; None: undivided.
        timeout: of every group.
    """

    def __init__(
        self,
        plan: Plan,
        buckets: Sequence[Bucket],
        shards: Mapping[str, ParameterShard],
        exchange: GroupedExchange | None,
        optimizer_weights: Sequence[int] | None,
        timeout: timedelta,
    ) -> None:
        self._shards, self._exchange = shards, exchange
        self._optimizer_weights = optimizer_weights
        self.own: list[BucketGroup] = []
        """This rank's buckets of whole layers, in order."""
        self.sharded: dict[int, list[BucketGroup]] = {}
        """This rank's buckets of each sharded layer."""
        # Sharded layers have groups of their own: their collectives come in another order.
        group_of: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
        rank = dist.get_rank()
        for bucket in buckets:
            key = bucket.holders, bucket.layer is not None
            if key not in group_of:
                alike = [b for b in buckets if (b.holders, b.layer is not None) == key]
                connections = self._connections(alike)
                group_of[key] = make_group(bucket.holders, timeout, "gradients", connections)
            # Keep the buckets of this rank: whole weights by order, sharded layers by layer.
            if rank not in bucket.holders:
                continue
            if bucket.layer is None:
                self.own.append((bucket, group_of[key]))
            else:
                self.sharded.setdefault(bucket.layer, []).append((bucket, group_of[key]))
        # Exchanges by groups of machines sum pairs of ranks with a group of their own.
        if exchange is not None and optimizer_weights is None:
            pairs = summing_pairs(plan, [b.holders for b in buckets if b.layer is None])
            for pair in pairs:
                if (pair, False) not in group_of:
                    group_of[pair, False] = make_group(pair, timeout, "gradients")
            exchange.use_pairs({p: group_of[p, False] for p in pairs if rank in p})

    def _connections(self, buckets: Sequence[Bucket]) -> Connections:
        """Return the connections of the group that exchanges some buckets."""
        holders, is_sharded = buckets[0].holders, buckets[0].layer is not None
        is_divided = self._optimizer_weights is not None
        if is_sharded or self._exchange is None or not self._exchange.crosses(buckets[0]):
            return ALL_TO_ALL if is_divided or is_sharded else COLLECTIVES
        # Other ranks do not know the shapes, and connect nothing.
        if dist.get_rank() not in holders:
            return COLLECTIVES
        # Who sends to whom depends on a bucket's size and its owners.
        pairs: set[tuple[int, int]] = set()
        for bucket in buckets:
            division = None
            if self._optimizer_weights is not None:
                division = division_by_rank(bucket, self._shards, self._optimizer_weights)
            pairs |= self._exchange.pairs(bucket, division)
        return Connections(pairs=frozenset(pairs))
