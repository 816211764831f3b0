"""Gradient sync across replicas that divide the same parameters differently.

The buckets and their order are `runtime.gradient_buckets`, the memory is `runtime.gradient_memory`;
here numbers move.  With `--overlap-grad-reduce` a bucket starts as soon as the last micro-batch has
finished its gradients and every bucket before it has started; without, all start after the last
backward pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.utils import get_model_config

from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.gradient_buckets import (
    MAX_BUCKET_ELEMENTS,
    Bucket,
    local_slices,
    plan_buckets,
)
from megatron_hetero.runtime.gradient_memory import BucketViews, arrange, data, main_grad
from megatron_hetero.runtime.groups import RankGroups
from megatron_hetero.runtime.shards import ParameterShard, global_parameters, shard_of
from megatron_hetero.runtime.traffic import Traffic

_PACKED_AT_ONCE = 2
"""Packed buckets that may be under way while the backward pass runs: what bounds their memory."""


class Reduction:
    """One bucket on one rank.  A step: pack (or not), weight, all-reduce, unpack (or not)."""

    def __init__(
        self,
        views: BucketViews,
        group: dist.ProcessGroup,
        copies: Sequence[tuple[int, int]],
        traffic: Traffic,
        ddp_config: Any,
    ) -> None:
        self.views = views
        self.group = group
        self._copies = copies
        self._traffic = traffic
        self._ddp_config = ddp_config
        self._in_place = views.in_place(main_grad)
        self._flat: torch.Tensor | None = None
        self._work: Any = None

    @property
    def is_packed(self) -> bool:
        return self._in_place is None

    @property
    def is_under_way(self) -> bool:
        return self._work is not None

    @property
    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def launch(self, weight: float) -> None:
        flat = self.views.pack(main_grad) if self._in_place is None else self._in_place
        check_gradients(flat, self._ddp_config)
        if weight != 1.0:
            flat.mul_(weight)
        for start, stop in self._copies:
            flat[start:stop] = 0.0
        self._flat = flat
        self._traffic.count(flat, packed=self.is_packed)
        self._work = dist.all_reduce(flat, group=self.group, async_op=True)

    def finish(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        if self.is_packed:
            self.views.unpack(self._flat, main_grad)
        self._flat = self._work = None


class GradientSync:
    """Reduces gradients over the whole job and weights them as one process would.

    Installed as `config.finalize_model_grads_func` by a `post_wrap_hook`, on every rank.  Its
    construction is collective: the ranks publish their shard tables (as JSON, never as pickled
    objects) and create one group for each set of holders in the same order.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        groups: RankGroups,
        plan: Plan,
        max_bucket_elements: int = MAX_BUCKET_ELEMENTS,
    ) -> None:
        self._groups = groups
        config = get_model_config(model[0])
        self.parameters = dict(global_parameters(model))
        self.shards = {
            name: shard_of(name, parameter, config) for name, parameter in self.parameters.items()
        }
        self._places = [(p.replica, p.stage, p.tensor_rank) for p in rank_table(plan)]
        stages = [(replica, stage) for replica, stage, _ in self._places]
        tables = _publish(self.shards)
        rank = dist.get_rank()
        own: list[tuple[Bucket, dist.ProcessGroup]] = []
        group_of: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for bucket in plan_buckets(tables, stages, max_bucket_elements):
            if bucket.holders not in group_of:
                made = dist.new_group(list(bucket.holders), timeout=groups.timeout)
                group_of[bucket.holders] = made
            if rank in bucket.holders:
                own.append((bucket, group_of[bucket.holders]))
        self.buckets = tuple(bucket for bucket, _ in own)
        arrange(model, self.buckets, self.parameters)
        self._local = BucketViews(local_slices(tables, stages, rank), self.shards, self.parameters)
        self.traffic = Traffic(
            sum(p.main_grad.nbytes for p in self.parameters.values())
            - sum(view.nbytes for _, view in self._local.views(main_grad))
        )
        self._ddp_config: Any = model[0].ddp_config
        self._reductions = [self._reduction(bucket, group) for bucket, group in own]
        self._launched = 0
        # Megatron divides by the replica's own number of micro-batches; this makes it the job's.
        self._counts = [replica.num_micro_batches for replica in plan.replicas]
        self._weight = self._counts[groups.position.replica] / sum(self._counts)
        if config.calculate_per_token_loss:
            self._weight = 1.0
        self._chunks = [ChunkGradients(self, chunk) for chunk in model]

    def _reduction(self, bucket: Bucket, group: dist.ProcessGroup) -> Reduction:
        views = BucketViews(bucket.slices, self.shards, self.parameters)
        copies = []
        offset = 0
        for piece, view in views.views(main_grad):
            shard = self.shards[piece.name]
            is_copy = not shard.is_sharded and not shard.is_partial
            if is_copy and self._groups.tensor.rank() != 0:
                copies.append((offset, offset + view.numel()))
            offset += view.numel()
        return Reduction(views, group, copies, self.traffic, self._ddp_config)

    def finalize(
        self,
        model: Sequence[torch.nn.Module],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> None:
        """Megatron's `finalize_model_grads_func`.

        With `num_tokens` (`--calculate-per-token-loss`; this rank's count, 0 off the last stage)
        gradients are sums and are divided by the job's tokens; without it each micro-batch counts
        alike, as in Megatron.
        """
        for chunk in model:
            chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
        self.reduce()
        if num_tokens is not None:
            self.scale(model, 1.0 / self.count_tokens(num_tokens))

    def count_tokens(self, num_tokens: torch.Tensor) -> int:
        """Tokens of the whole job's step; each micro-batch is counted on one rank."""
        total = num_tokens.to(torch.int64)
        if not self._groups.is_last_stage or self._groups.tensor.rank() != 0:
            total.zero_()
        dist.all_reduce(total)
        return max(int(total.item()), 1)

    def scale(self, model: Sequence[torch.nn.Module], factor: float) -> None:
        for chunk in model:
            chunk.scale_gradients(factor)

    def launch_ready(self) -> None:
        """Start every bucket whose turn it is and whose gradients are done, without waiting."""
        while self._launched < len(self._reductions):
            reduction = self._reductions[self._launched]
            if not all(chunk.is_ready(reduction.views.parameters) for chunk in self._chunks):
                return
            if reduction.is_packed and not self._has_room():
                return
            self._launch_next()

    def reduce(self) -> None:
        """Sum every slice over its holders; of a tensor group's equal copies one counts."""
        while self._launched < len(self._reductions):
            if self._reductions[self._launched].is_packed:
                self._make_room()
            self._launch_next()
        for reduction in self._reductions:
            reduction.finish()
        self._launched = 0
        self.traffic.num_steps += 1
        for _, view in self._local.views(main_grad):
            check_gradients(view, self._ddp_config)
            if self._weight != 1.0:
                view.mul_(self._weight)

    def _launch_next(self) -> None:
        self._reductions[self._launched].launch(self._weight)
        self._launched += 1

    def _packed_under_way(self) -> list[Reduction]:
        return [r for r in self._reductions if r.is_packed and r.is_under_way]

    def _has_room(self) -> bool:
        under_way = self._packed_under_way()
        if len(under_way) < _PACKED_AT_ONCE:
            return True
        # To wait here could hold up a stage that the other holders wait for; to look cannot.
        if under_way[0].is_completed:
            under_way[0].finish()
            return True
        return False

    def _make_room(self) -> None:
        under_way = self._packed_under_way()
        if len(under_way) >= _PACKED_AT_ONCE:
            under_way[0].finish()

    def equalise_parameters(self) -> None:
        """Give all holders of a slice the first place's weights, to the last bit.

        First is meant in the order of the plan, not of ranks: Megatron leaves zeros in the copy of
        a tied embedding on the last stage, which may well have the lower rank.
        """
        for bucket, reduction in zip(self.buckets, self._reductions, strict=True):
            flat = reduction.views.pack(data)
            places = [self._places[rank] for rank in bucket.holders]
            dist.broadcast(flat, group=reduction.group, group_src=places.index(min(places)))
            reduction.views.unpack(flat, data)


class ChunkGradients:
    """What Megatron's DDP calls one of its bucket groups, for a whole model chunk.

    DDP's hooks report every gradient (`register_grad_ready`), its `no_sync` says which micro-batch
    is the last, and its `finish_grad_sync` that the step's backward passes are over.
    """

    def __init__(self, sync: GradientSync, chunk: Any) -> None:
        self._sync = sync
        self._parameters = set(chunk.param_to_bucket_group)
        self.is_last_microbatch = True
        # How often a parameter's hook runs in a micro-batch is learned in the first step, as
        # Megatron does: a weight used twice has its gradient after the second call.
        self._expected: dict[torch.nn.Parameter, int] = {}
        self._seen: dict[torch.nn.Parameter, int] = {}
        self._is_finished = False
        chunk.bucket_groups = [self]
        chunk.param_to_bucket_group = dict.fromkeys(chunk.param_to_bucket_group, self)

    def is_ready(self, parameters: set[torch.nn.Parameter]) -> bool:
        """Whether those of `parameters` that are in this chunk have their gradients."""
        if self._is_finished:
            return True
        return bool(self._expected) and all(
            self._seen.get(p, 0) >= self._expected.get(p, 1)
            for p in parameters
            if p in self._parameters
        )

    def register_grad_ready(
        self, parameter: torch.nn.Parameter, force_all_reduce: bool = False
    ) -> None:
        if not self.is_last_microbatch:
            return
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if self._expected and self._seen[parameter] == self._expected.get(parameter, 1):
            self._sync.launch_ready()

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Megatron's interleaved schedules call this once the chunk's gradients are done."""
        self._finish()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._sync.launch_ready()

    def reset(self) -> None:
        """A new step begins (DDP's `zero_grad_buffer`)."""
        if not self._expected:
            self._expected = self._seen
        self._seen = {}
        self._is_finished = False
        self.is_last_microbatch = True

    def free_overlap_buffers(self) -> None:
        """Parameters are gathered without buffers of their own."""


def check_gradients(gradients: torch.Tensor, ddp_config: Any) -> None:
    """Megatron's check for NaN, infinite and unexpectedly large gradients, where it is asked for.

    Before the sum over ranks, as Megatron does, so that the message names the rank at fault.
    """
    if ddp_config.check_for_nan_in_grad or ddp_config.check_for_large_grads:
        bucket = SimpleNamespace(grad_data=gradients)
        _ParamAndGradBucketGroup.check_grads(
            SimpleNamespace(buckets=[bucket]),
            check_for_nan_or_inf=ddp_config.check_for_nan_in_grad,
            check_for_large=ddp_config.check_for_large_grads,
        )


def _publish(shards: Mapping[str, ParameterShard]) -> list[dict[str, ParameterShard]]:
    """All ranks' shard tables, as JSON in byte tensors."""
    device = torch.cuda.current_device()
    text = json.dumps([asdict(s) for s in shards.values()]).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    size = torch.tensor([own.numel()], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s.item()) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [
        {
            entry["name"]: ParameterShard.from_json(entry)
            for entry in json.loads(bytes(raw[: int(n.item())].tolist()))
        }
        for raw, n in zip(gathered, sizes, strict=True)
    ]
