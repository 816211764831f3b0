"""Gradient sync across replicas that divide the same parameters differently.

`runtime.gradients.buckets` has the buckets and their order, `runtime.gradients.memory` their
memory, `runtime.gradients.weights` the way of new weights; this file moves gradients. With
`--overlap-grad-reduce` a bucket starts within the passes when (1) its layers have the gradients of
the last micro-batch, (2) every bucket before it has started, (3) the schedule lets this stage start
buckets there (`schedule.orders.early_gradients`), and (4) every rank has memory for it
(`runtime.gradients.room`). All others start after the last backward pass.

What starts when does not depend on how fast anything is: on a GPU the host is ahead of what it
would look at, and the proof that a job ends (`schedule.proof`) knows the order of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_hetero.cost.sync.buckets import MAX_BUCKET_ELEMENTS
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.gradients.bucket_groups import BucketGroups
from megatron_hetero.runtime.gradients.buckets import (
    depth,
    layer_number,
    local_slices,
    plan_buckets,
)
from megatron_hetero.runtime.gradients.groups.grouped import exchange_of
from megatron_hetero.runtime.gradients.hooks import ChunkGradients
from megatron_hetero.runtime.gradients.memory import BucketViews, arrange, main_grad
from megatron_hetero.runtime.gradients.rank_buckets import RankBuckets
from megatron_hetero.runtime.gradients.reduction import DividedReduction, Reduction, check_gradients
from megatron_hetero.runtime.gradients.room import RoomUnderWay, room_of_rank
from megatron_hetero.runtime.gradients.sharding.ddp_hooks import sharded_numbers
from megatron_hetero.runtime.gradients.sharding.sharded_layers import ShardedLayers
from megatron_hetero.runtime.gradients.weights import HeldWeights
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.shard_tables import all_shards
from megatron_hetero.runtime.parallel.shards import global_parameters, shard_of
from megatron_hetero.runtime.parallel.traffic import RankTraffic


class GradientSync:
    """Reduction of gradients over the whole job, with the weights of a single process's sum.

    A `post_wrap_hook` installs it as `config.finalize_model_grads_func` on every rank. Its
    construction is collective: the ranks publish their shard tables (as JSON, never as pickled
    objects) and create one group for each set of holders, in the same order.

    Args:
        optimizer_weights: [rank] -> relative part of the shared optimizer state that it keeps
            (`--use-distributed-optimizer`); None: every holder keeps all.
        overlaps_gathers: the new weights travel until the forward pass needs them, and sharded
            layers' exchanges while other layers compute (`--overlap-param-gather`).
        aligned: only first stages start buckets within their passes (`--align-grad-reduce`).
        precisions: [rank] -> what it computes in; None: all in one.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        groups: RankGroups,
        plan: Plan,
        optimizer_weights: Sequence[int] | None = None,
        max_bucket_elements: int = MAX_BUCKET_ELEMENTS,
        *,
        overlaps_gathers: bool = False,
        aligned: bool = True,
        precisions: Sequence[Precision] | None = None,
    ) -> None:
        self._groups = groups
        # What this rank holds of every parameter, and what all other ranks hold.
        config = get_model_config(model[0])
        numbers = sharded_numbers(plan)
        self.parameters = dict(global_parameters(model))
        self.shards = {
            name: shard_of(name, parameter, config) for name, parameter in self.parameters.items()
        }
        exchange = exchange_of(plan)
        # Context-parallel ranks hold equal weights, and gradients of unlike tokens, as replicas do.
        stages = [(p.replica, p.stage, p.context_rank) for p in rank_table(plan)]
        tables = all_shards(self.shards)
        rank = dist.get_rank()
        buckets = plan_buckets(tables, stages, max_bucket_elements, numbers)
        made = BucketGroups(
            plan, buckets, self.shards, exchange, optimizer_weights, groups.timeout
        )
        own, sharded = made.own, made.sharded
        # Lay the gradients out by bucket; local slices are in no bucket.
        self.buckets = tuple(bucket for bucket, _ in own)
        arrange(model, self.buckets, self.parameters)
        self._local = BucketViews(local_slices(tables, stages, rank), self.shards, self.parameters)
        # Least traffic of a step: gradients that other ranks hold too, each once.
        self.traffic = RankTraffic(
            sum(
                p.main_grad.nbytes
                for name, p in self.parameters.items()
                if layer_number(name) not in sharded
            )
            - sum(view.nbytes for _, view in self._local.views(main_grad))
        )
        self._ddp_config: Any = model[0].ddp_config
        # A reduction for each bucket, and the memory for those under way.
        made_of = RankBuckets(
            groups,
            self.shards,
            self.parameters,
            self.traffic,
            self._ddp_config,
            exchange,
            optimizer_weights,
        )
        self._reductions = [made_of.reduction(bucket, group) for bucket, group in own]
        self._room = RoomUnderWay(
            room_of_rank(plan, rank, overlaps=self._ddp_config.overlap_grad_reduce),
            self._reductions,
            [bucket.num_elements for bucket in self.buckets],
        )
        self._launched = 0
        self._num_early = self._count_early(aligned)
        # All parameters of a bucket's layers, the last ones of a backward pass first: buckets start
        # between layers, where the proof has them.
        of_depth: dict[float, list[torch.nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            of_depth.setdefault(depth(name), []).append(parameter)
        self._completing = [
            [p for at in sorted({depth(s.name) for s in bucket.slices}) for p in of_depth[at]]
            for bucket in self.buckets
        ]
        # Megatron divides by the replica's own number of micro-batches; this makes it the job's.
        self._counts = [replica.num_micro_batches for replica in plan.replicas]
        self._weight = self._counts[groups.position.replica] / sum(self._counts)
        if config.calculate_per_token_loss:
            self._weight = 1.0
        # Sharded layers exchange within the passes.
        self.sharded = ShardedLayers(
            model,
            {at: [made_of.sharded(*pair) for pair in pairs] for at, pairs in sharded.items()},
            self._weight,
            overlaps=overlaps_gathers,
        )
        # Each chunk's DDP reports complete gradients, which may start buckets.
        self._chunks = [
            ChunkGradients(chunk, self.launch_ready, self.sharded.zero_gradients) for chunk in model
        ]
        self.weights = HeldWeights(
            model,
            plan,
            self._reductions,
            self.sharded,
            self._room,
            overlaps_gathers=overlaps_gathers,
            precisions=precisions,
        )

    def _count_early(self, aligned: bool) -> int:
        """Count this rank's buckets that may start within its passes; collective.

        Where one rank has no room for a bucket, no rank starts those of the bucket's layer, nor of
        layers before it: ranks that started a later bucket would wait for those that may not.
        """
        if not self._ddp_config.overlap_grad_reduce:
            # Without --overlap-grad-reduce every bucket starts after the passes.
            return 0
        deepest_late = -inf
        # Under --align-grad-reduce later stages start nothing early: their room does not count.
        place = self._room.first_without
        if place is not None and not (aligned and self._groups.position.stage):
            deepest_late = self.buckets[place].depth
        # The deepest layer without room on any rank decides for the whole job.
        of_job = torch.tensor(deepest_late, device=torch.cuda.current_device())
        dist.all_reduce(of_job, op=dist.ReduceOp.MAX)
        # Buckets of that layer are late as well, hence the strict comparison.
        return sum(bucket.depth > of_job.item() for bucket in self.buckets)

    def finalize(
        self,
        model: Sequence[torch.nn.Module],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> None:
        """Reduce and scale the gradients of a step: Megatron's `finalize_model_grads_func`.

        With `num_tokens` (`--calculate-per-token-loss`) gradients are sums, and are divided by the
        job's tokens; without it each micro-batch counts alike, as in Megatron.

        Args:
            model: the model chunks.
            num_tokens: this rank's tokens, 0 off the last stage.
            pg_collection: Megatron's argument; not read.
            force_all_reduce: all holders get the sums, not only the owners of an optimizer's state
                (`--save-wgrads-interval`).
        """
        # A module that no micro-batch reached has not waited for its weights.
        self.weights.finish_under_way()
        for chunk in model:
            chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
        self.reduce()
        if num_tokens is not None:
            self.scale(model, 1.0 / self.count_tokens(num_tokens))
        if force_all_reduce:
            self.weights.gather(main_grad)

    def count_tokens(self, num_tokens: torch.Tensor) -> int:
        """Count the tokens of the whole job's step; one rank counts each micro-batch."""
        total = num_tokens.to(torch.int64)
        # Tensor-parallel ranks have the same tokens, context-parallel ranks tokens of their own.
        if not self._groups.is_last_stage or self._groups.tensor.rank() != 0:
            total.zero_()
        dist.all_reduce(total)
        return max(int(total.item()), 1)

    def scale(self, model: Sequence[torch.nn.Module], factor: float) -> None:
        for chunk in model:
            chunk.scale_gradients(factor)
        for reduction in self.divided:
            for gradient in reduction.loose_gradients:
                gradient.mul_(factor)
        for bucket in self.sharded.buckets:
            bucket.gradients.mul_(factor)

    @property
    def num_started(self) -> int:
        """Count the buckets started in this step; 0 again after `finalize`."""
        return self._launched

    @property
    def reductions(self) -> Sequence[Reduction]:
        """Return this rank's buckets, in the order of starts."""
        return self._reductions

    @property
    def divided(self) -> list[DividedReduction]:
        """Return the buckets with an optimizer state divided among the holders."""
        return self.weights.divided

    @property
    def local(self) -> BucketViews:
        """Return the slices that need no exchange (see `plan_buckets`)."""
        return self._local

    def launch_ready(self) -> None:
        """Start every bucket in turn that may start early and has complete gradients."""
        while self._launched < self._num_early:
            # Only in order: a complete bucket waits for every bucket before.
            parameters = self._completing[self._launched]
            if not all(chunk.is_ready(parameters) for chunk in self._chunks):
                return
            self._launch_next()

    def reduce(self) -> None:
        """Sum every slice over its holders; of a tensor group's equal copies one counts."""
        # Buckets that did not start within the passes, in order, as far as there is room.
        while self._launched < len(self._reductions):
            self._find_room(self._reductions[self._launched])
            self._launch_next()
        for reduction in self._reductions:
            reduction.finish()
        self._launched = 0
        self.traffic.num_steps += 1
        # Local slices need no exchange, but the weight of this rank's gradients all the same.  The
        # host waits for the GPU in each check, so whole ranges of memory are checked at once.
        for run in self._local.runs(main_grad):
            check_gradients(run, self._ddp_config)
            if self._weight != 1.0:
                run.mul_(self._weight)

    def _launch_next(self) -> None:
        self._reductions[self._launched].launch(self._weight)
        self._launched += 1

    def _find_room(self, reduction: Reduction) -> None:
        """Finish the first buckets under way until the next one has room."""
        under_way = [r for r in self._reductions if r.is_under_way and r.num_copies]
        while not self._room.fits(reduction, under_way):
            under_way.pop(0).finish()


_ATTRIBUTE = "hetero_gradient_sync"


def set_gradient_sync(config: Any, sync: GradientSync) -> None:
    """Store `sync` on a model's configuration, where `gradient_sync` finds it."""
    setattr(config, _ATTRIBUTE, sync)
    config.finalize_model_grads_func = sync.finalize


def gradient_sync(config: Any) -> GradientSync | None:
    """Return the sync of an asymmetric plan; None under stock Megatron."""
    return getattr(config, _ATTRIBUTE, None)
