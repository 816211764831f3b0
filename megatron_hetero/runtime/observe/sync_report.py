"""Summary of the gradient sync of a step, for the start of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from megatron_hetero.runtime.gradients.memory import main_grad
from megatron_hetero.runtime.gradients.sync import GradientSync
from megatron_hetero.units import format_bytes


@dataclass(frozen=True)
class SyncPlan:
    """One rank's part of a step's gradient sync.

    `least_bytes` counts gradients that other ranks hold too, each once.
    """

    num_collectives: int
    payload_bytes: int
    least_bytes: int
    copied_bytes: int
    num_weights: int
    num_weights_with_state: int


def sync_plan(sync: GradientSync) -> SyncPlan:
    """Describe the sync on this rank."""
    buckets = [sum(v.nbytes for _, v in r.views.views(main_grad)) for r in sync.reductions]
    copied = [size for size, r in zip(buckets, sync.reductions, strict=True) if not r.is_in_place]
    held = sum(p.numel() for p in sync.parameters.values())
    # Elements with optimizer state on this rank: local slices, own rows, sharded rows.
    kept = sum(v.numel() for _, v in sync.local.views(main_grad)) + sum(
        gradient.numel() for r in sync.divided for gradient in r.own_gradients
    )
    kept += sum(bucket.gradients.numel() for bucket in sync.sharded.buckets)
    return SyncPlan(
        len(buckets),
        sum(buckets),
        sync.traffic.bound_bytes,
        sum(copied),
        held,
        kept if sync.divided or sync.sharded else held,
    )


def gather_sync_plans(sync: GradientSync) -> list[SyncPlan]:
    """Gather the parts of all ranks, [rank]. Collective."""
    own = torch.tensor(astuple(sync_plan(sync)), device=torch.cuda.current_device())
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [SyncPlan(*(int(value) for value in part)) for part in parts]


def sync_lines(parts: Sequence[SyncPlan]) -> Iterator[str]:
    """Yield lines for the log, from the parts of all ranks."""
    payload, least = sum(p.payload_bytes for p in parts), sum(p.least_bytes for p in parts)
    if not payload:
        yield "> gradient sync: none, no gradient has a second holder"
        return
    copied = sum(p.copied_bytes for p in parts)
    yield (
        f"> gradient sync, a step: {_span([p.num_collectives for p in parts], str)} collectives "
        f"and {_span([p.payload_bytes for p in parts], format_bytes)} on a rank, "
        f"{payload / least:.2f}x the least; {copied / payload:.0%} copied first"
    )
    kept, held = sum(p.num_weights_with_state for p in parts), sum(p.num_weights for p in parts)
    if kept < held:
        shares = [p.num_weights_with_state / p.num_weights for p in parts]
        yield (
            f"> optimizer state: each rank keeps that of {_span(shares, '{:.0%}'.format)} of its "
            f"weights, all ranks {kept / held:.0%} of an undivided optimizer's"
        )


def _span(values: Sequence[float], text: Callable[[float], str]) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"
