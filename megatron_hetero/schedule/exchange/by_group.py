"""An exchange by groups of machines on the cluster's paths."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.group_flow import group_transfers
from megatron_hetero.cost.network.ring import held_fraction
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.exchange.plan import Purpose
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.schedule.network import hops

Taken = tuple[tuple[tuple[str, float], ...], tuple[float, ...], float]
"""Paths, each with the seconds for which an exchange takes the path; bytes over each; latency."""


def taken_by_groups(
    cluster: Cluster,
    model: ModelSpec,
    holders: Sequence[PlacedStage],
    groups: Sequence[Sequence[str]],
    purpose: Purpose,
    sizes: tuple[float, float],
    weights: Sequence[int] | None = None,
    uplinks: Sequence[Sequence[int]] = (),
) -> Taken | None:
    """Return what an exchange takes; None where all holders are in one group.

    Args:
        cluster: its links.
        model: decides the parts that unlike shares hold.
        holders: tensor-parallel groups, or single ranks.
        groups: `Plan.exchange_groups`.
        purpose: all-reduce, reduce-scatter or all-gather.
        sizes: bytes of the buffer, and of what one rank of a holder has of it.
        weights: relative sizes of what each holder owns of a divided buffer.
        uplinks: `Plan.exchange_uplinks`.
    """
    # Transfers between the holders, in fractions of the buffer.
    num_bytes, rank_bytes = sizes
    devices = [holder.devices[0] for holder in holders]
    found = group_transfers(cluster, devices, groups, purpose, weights, uplinks)
    if found is None:
        return None
    # Spread each transfer over the paths on its way.
    seconds: dict[str, float] = {}
    carried: dict[str, float] = {}
    for t in found.transfers:
        sender, receiver = holders[t.sender], holders[t.receiver]
        taken_s, part = t.s_per_byte * num_bytes, t.part * num_bytes
        # Inside a machine a holder with unequal shares is as slow as its rank with the most.
        if devices[t.sender].node == devices[t.receiver].node:
            taken_s *= max(held_fraction(model, holder) for holder in (sender, receiver))
        for path, path_s in hops(cluster, sender.devices, receiver.devices, taken_s, part):
            seconds[path] = seconds.get(path, 0.0) + path_s
            carried[path] = carried.get(path, 0.0) + part
    # Owners add what they received: that time overlaps with nothing here.
    latency_s = found.latency_s + found.adding_s_per_byte * rank_bytes
    return tuple(seconds.items()), tuple(carried.values()), latency_s
