"""What an exchange takes from the cluster's paths: seconds, bytes and latency."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.group_flow import group_transfers
from megatron_hetero.cost.network.link_terms import FanIn, adding_s, transfer_s
from megatron_hetero.cost.network.ring import RingHop, held_fraction, pass_latency_s
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.exchange.plan import Purpose
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.schedule.network import hops

Taken = tuple[tuple[tuple[str, float], ...], float, tuple[float, ...]]
"""Paths, each with the seconds for which an exchange takes the path; latency; bytes over each."""


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
    """Return what an exchange by groups of machines takes; None where all holders are in one group.

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
    return tuple(seconds.items()), latency_s, tuple(carried.values())


def taken_in_ring(
    cluster: Cluster, ring: Sequence[RingHop], num_passes: int, num_bytes: float, *, reduces: bool
) -> Taken:
    """Return what passes of a buffer round a ring take.

    Args:
        cluster: its links.
        ring: the hops.
        num_passes: one of a reduce-scatter or an all-gather, two of an all-reduce.
        num_bytes: of the buffer.
        reduces: parts are added up on the way.
    """
    # Every hop carries (n - 1) / n of the buffer in each pass.
    share = (len(ring) - 1) / len(ring)
    once = num_passes * share * num_bytes
    taken: list[tuple[str, float]] = []
    for hop in ring:
        seconds = hop.passes_s_per_byte(num_passes, reduces) * num_bytes
        taken += hops(cluster, *hop.ends, seconds, once)
    latency_s = num_passes * pass_latency_s([hop.latency_s for hop in ring])
    return tuple(taken), latency_s, (once,) * len(taken)


def taken_directly(
    cluster: Cluster, devices: Sequence[Device], weights: Sequence[int], num_bytes: float
) -> Taken:
    """Return what messages from every rank to every other rank take, each with the part of the
    buffer that the other rank owns.

    Args:
        cluster: its links.
        devices: of the ranks.
        weights: relative sizes of what each rank owns.
        num_bytes: of the buffer.
    """
    seconds: dict[str, float] = {}
    carried: dict[str, float] = {}
    # Latency and addition once, the slowest of all pairs; seconds add up by path.
    fan_in = FanIn(cluster, devices)
    latency_s = added_s = 0.0
    for sender in devices:
        for weight, receiver in zip(weights, devices, strict=True):
            if sender is receiver:
                continue
            part = num_bytes * weight / sum(weights)
            link = cluster.path(sender, receiver)
            latency_s = max(latency_s, link.latency_s)
            added_s = max(added_s, adding_s(part, len(weights) - 1, link))
            num_senders = fan_in.num_senders(sender.node, receiver.node, link)
            part_s = transfer_s(part, link, num_senders)
            for path, taken_s in hops(cluster, [sender], [receiver], part_s, part):
                seconds[path] = seconds.get(path, 0.0) + taken_s
                carried[path] = carried.get(path, 0.0) + part
    return tuple(seconds.items()), latency_s + added_s, tuple(carried.values())
