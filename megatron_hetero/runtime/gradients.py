"""Gradient sync across replicas that divide the same parameters differently.

Every parameter is cut at the union of all ranks' shard edges.  Slices of all parameters with the
same set of holders share flat fp32 buffers, one all-reduce each; the buckets follow one order that
is the same on every rank.  A layer norm under sequence parallelism, a tied embedding on two stages
and the same layer at width 4 here and 3 there are all the same thing: slices with holders.

The layout of the buckets (`plan_buckets`) is pure; `GradientSync` is the edge that moves numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.groups import RankGroups
from megatron_hetero.runtime.shards import ParameterShard, global_parameters, shard_of

MAX_BUCKET_ELEMENTS = 64 << 20
"""256 MiB of fp32: what the sync holds at a time beside the gradients themselves."""


@dataclass(frozen=True)
class Slice:
    """`start:stop` along the divided dimension of global parameter `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Slices that the same ranks hold, in the order in which they lie in the flat buffer."""

    holders: tuple[int, ...]
    slices: tuple[Slice, ...]


def plan_buckets(
    tables: Sequence[Mapping[str, ParameterShard]],
    stages: Sequence[tuple[int, int]],
    max_elements: int = MAX_BUCKET_ELEMENTS,
) -> tuple[Bucket, ...]:
    """Group the slices of all parameters by their holders.

    Args:
        tables: [rank] -> shards by name.
        stages: [rank] -> (replica, stage), which is the rank's tensor-parallel group.
        max_elements: of one bucket, unless a single slice is larger.
    Returns:
        Buckets of two holders and more, ordered by holders; slices are ordered by name and start.
        Left out is what needs no communication: a slice with one holder, and copies inside one
        tensor-parallel group, which Megatron keeps equal by itself.
    Raises:
        PlanFormatError: ranks disagree about a parameter's global shape.
    """
    holders_of: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        for name in table:
            holders_of.setdefault(name, []).append(rank)
    slices: dict[tuple[int, ...], list[tuple[Slice, int]]] = {}
    for name in sorted(holders_of):
        shards = {rank: tables[rank][name] for rank in holders_of[name]}
        _require_equal_shapes(name, shards)
        first = shards[holders_of[name][0]]
        edges = {edge for s in shards.values() for interval in s.intervals for edge in interval}
        for start, stop in pairwise(sorted(edges)):
            holders = tuple(rank for rank, shard in shards.items() if shard.holds(start, stop))
            one_group = len({stages[rank] for rank in holders}) == 1
            if one_group and not any(shards[rank].is_partial for rank in holders):
                continue
            if len(holders) > 1:
                size = (stop - start) * prod(first.global_shape) // first.global_shape[first.dim]
                slices.setdefault(holders, []).append((Slice(name, start, stop), size))
    return tuple(
        Bucket(holders, part)
        for holders in sorted(slices)
        for part in _parts(slices[holders], max_elements)
    )


def _parts(
    sized_slices: Sequence[tuple[Slice, int]], max_elements: int
) -> Iterator[tuple[Slice, ...]]:
    """Cut a row of slices into runs of at most `max_elements`, if no slice is larger by itself."""
    part: list[Slice] = []
    total = 0
    for piece, size in sized_slices:
        if part and total + size > max_elements:
            yield tuple(part)
            part, total = [], 0
        part.append(piece)
        total += size
    yield tuple(part)


def _require_equal_shapes(name: str, shards: Mapping[int, ParameterShard]) -> None:
    (first_rank, first), *rest = shards.items()
    for rank, shard in rest:
        if (shard.global_shape, shard.dim) != (first.global_shape, first.dim):
            raise PlanFormatError(
                f"{name}: rank {first_rank} holds a part of a tensor of shape "
                f"{first.global_shape} divided along {first.dim}, rank {rank} of "
                f"{shard.global_shape} along {shard.dim}; all ranks must build the same model."
            )


class GradientSync:
    """Reduces gradients over the whole job and weights them as one process would.

    Installed as `config.finalize_model_grads_func` by a `post_wrap_hook`, on every rank.  Its
    construction is collective: the ranks publish their shard tables (as JSON, never as pickled
    objects) and create one group for each bucket in the same order.
    """

    def __init__(self, model: Sequence[torch.nn.Module], groups: RankGroups, plan: Plan) -> None:
        self._groups = groups
        config = get_model_config(model[0])
        self.parameters = dict(global_parameters(model))
        self.shards = {
            name: shard_of(name, parameter, config) for name, parameter in self.parameters.items()
        }
        self._places = [(p.replica, p.stage, p.tensor_rank) for p in rank_table(plan)]
        stages = [(replica, stage) for replica, stage, _ in self._places]
        self._buckets: list[tuple[Bucket, dist.ProcessGroup]] = []
        group_of: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for bucket in plan_buckets(_publish(self.shards), stages):
            if bucket.holders not in group_of:
                made = dist.new_group(list(bucket.holders), timeout=groups.timeout)
                group_of[bucket.holders] = made
            group = group_of[bucket.holders]
            if dist.get_rank() in bucket.holders:
                self._buckets.append((bucket, group))
        # Megatron divides by the replica's own number of micro-batches; this makes it the job's.
        counts = [replica.num_micro_batches for replica in plan.replicas]
        self._mean_weight = counts[groups.position.replica] / sum(counts)

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
        if num_tokens is None and self._mean_weight != 1.0:
            self.scale(model, self._mean_weight)
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

    def reduce(self) -> None:
        """Sum every slice over its holders; of a tensor group's equal copies one counts."""
        for bucket, group in self._buckets:
            flat = self._pack(bucket, _main_grad)
            if self._groups.tensor.rank() != 0:
                self._silence_copies(bucket, flat)
            dist.all_reduce(flat, group=group)
            self._unpack(bucket, flat, _main_grad)

    def equalise_parameters(self) -> None:
        """Give all holders of a slice the first place's weights, to the last bit.

        First is meant in the order of the plan, not of ranks: Megatron leaves zeros in the copy of
        a tied embedding on the last stage, which may well have the lower rank.
        """
        for bucket, group in self._buckets:
            flat = self._pack(bucket, _data)
            places = [self._places[rank] for rank in bucket.holders]
            dist.broadcast(flat, group=group, group_src=places.index(min(places)))
            self._unpack(bucket, flat, _data)

    def _silence_copies(self, bucket: Bucket, flat: torch.Tensor) -> None:
        offset = 0
        for piece, view in self._views(bucket, _main_grad):
            shard = self.shards[piece.name]
            if not shard.is_sharded and not shard.is_partial:
                flat[offset : offset + view.numel()] = 0.0
            offset += view.numel()

    def _pack(self, bucket: Bucket, source: _Source) -> torch.Tensor:
        return torch.cat([view.reshape(-1).float() for _, view in self._views(bucket, source)])

    def _unpack(self, bucket: Bucket, flat: torch.Tensor, target: _Source) -> None:
        offset = 0
        for _, view in self._views(bucket, target):
            view.copy_(flat[offset : offset + view.numel()].view(view.shape))
            offset += view.numel()

    def _views(self, bucket: Bucket, source: _Source) -> Iterator[tuple[Slice, torch.Tensor]]:
        for piece in bucket.slices:
            shard = self.shards[piece.name]
            start, length = shard.local_offset(piece.start), piece.stop - piece.start
            yield piece, source(self.parameters[piece.name]).narrow(shard.dim, start, length)


_Source = Callable[[torch.nn.Parameter], torch.Tensor]


def _main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.main_grad


def _data(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.data


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
