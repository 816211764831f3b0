"""The buckets of a rank, each of the class that the plan asks for: all-reduced or reduced to
owners, in one exchange or by groups of machines; or gathered for each pass, for sharded layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.runtime.gradients.buckets import Bucket
from megatron_hetero.runtime.gradients.groups.grouped import (
    GroupedDividedReduction,
    GroupedExchange,
    GroupedReduction,
)
from megatron_hetero.runtime.gradients.memory import BucketViews, data
from megatron_hetero.runtime.gradients.reduction import DividedReduction, Reduction
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import Division, division_by_rank
from megatron_hetero.runtime.gradients.sharding.sharded_buckets import ShardedBucket
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.shards import ParameterShard
from megatron_hetero.runtime.parallel.traffic import RankTraffic


@dataclass(frozen=True)
class RankBuckets:
    """Makes the buckets of one rank.

    Args:
        groups: of this rank.
        shards: of its parameters, by name.
        parameters: by name.
        traffic: counts what the rank sends.
        ddp_config: Megatron's configuration of DDP.
        exchange: the plan's exchange by groups of machines, if it has one.
        optimizer_weights: [rank] -> relative part of the shared optimizer state that it keeps; None
            where every holder keeps all.
    """

    groups: RankGroups
    shards: Mapping[str, ParameterShard]
    parameters: Mapping[str, torch.nn.Parameter]
    traffic: RankTraffic
    ddp_config: Any
    exchange: GroupedExchange | None
    optimizer_weights: Sequence[int] | None

    def reduction(self, bucket: Bucket, group: dist.ProcessGroup) -> Reduction:
        """Return the reduction of a bucket of layers that are not sharded, among its holders."""
        views = self._views(bucket)
        common = views, group, self._copies(views), self.traffic, self.ddp_config
        exchange = self.exchange
        grouped = exchange if exchange is not None and exchange.crosses(bucket) else None
        if self.optimizer_weights is None:
            return GroupedReduction(*common, bucket, grouped) if grouped else Reduction(*common)
        division = self._division(bucket)
        if grouped is not None:
            return GroupedDividedReduction(*common, division, bucket, grouped)
        return DividedReduction(*common, division)

    def sharded(self, bucket: Bucket, group: dist.ProcessGroup) -> ShardedBucket:
        """Return a bucket of a sharded layer."""
        views = self._views(bucket)
        common = self._division(bucket), self.traffic, self.ddp_config
        return ShardedBucket(views, group, self._copies(views), *common)

    def _views(self, bucket: Bucket) -> BucketViews:
        return BucketViews(bucket.slices, self.shards, self.parameters)

    def _division(self, bucket: Bucket) -> Division:
        weights = self.optimizer_weights or [1] * dist.get_world_size()
        return division_by_rank(bucket, self.shards, weights)

    def _copies(self, views: BucketViews) -> list[tuple[int, int]]:
        """Return the ranges of a bucket that another rank of the group counts."""
        copies = []
        offset = 0
        for piece, view in views.views(data):
            shard = self.shards[piece.name]
            # Whole on every rank of the group, with equal gradients: the first rank's count.
            is_copy = not shard.is_sharded and not shard.is_partial
            if is_copy and self.groups.tensor.rank() != 0:
                copies.append((offset, offset + view.numel()))
            offset += view.numel()
        return copies
