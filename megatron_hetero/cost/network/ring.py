"""The ring over the holders of a gradient buffer, and the price of its hops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from megatron_hetero.cluster.spec import Cluster, Device
from megatron_hetero.cost.network.link_terms import adding_s, transfer_s
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.cost.share import largest_fraction, member_shares
from megatron_hetero.model.spec import ModelSpec


@dataclass(frozen=True)
class RingHop:
    """One step of a ring: seconds for each byte of the whole buffer in one pass, those of adding
    what is received where the pass reduces, and the link's latency.

    `ends`: GPUs that send and that receive, an equal part each; one that does more stands several
    times.
    """

    ends: tuple[tuple[Device, ...], tuple[Device, ...]]
    s_per_byte: float
    adding_s_per_byte: float
    latency_s: float

    @property
    def nodes(self) -> tuple[str, str]:
        """Return the nodes that the hop leads from and to."""
        return self.ends[0][0].node, self.ends[1][0].node

    def passes_s_per_byte(self, num_passes: int, reduces: bool) -> float:
        """Return the seconds per byte for which the hop is taken in all passes; the first may
        reduce."""
        return num_passes * self.s_per_byte + (self.adding_s_per_byte if reduces else 0.0)


def ring(cluster: Cluster, model: ModelSpec, stages: Sequence[PlacedStage]) -> tuple[RingHop, ...]:
    """Build the ring over the holders of a buffer, for a pass with (n - 1) / n of the buffer over
    every hop (a reduce-scatter or an all-gather; an all-reduce is both).

    It visits sites, then nodes, one after the other: in the order of the plan's ranks.  Those of
    the tensor-parallel groups work side by side: inside a node on links of their own, between nodes
    on the path of the two.  NCCL makes such a ring out of several, which leave and enter a node
    over the NICs near all its holders in turn, so that each NIC carries an equal part.

    Args:
        model: decides the parts that unlike shares hold.
        stages: tensor-parallel groups that hold the buffer, in any order.
    """
    # Holders in the order of the ring, each with the largest part on one of its ranks.
    ordered = sorted(stages, key=lambda stage: ring_key(cluster, stage.devices[0]))
    share = (len(ordered) - 1) / len(ordered)
    parts = [held_fraction(model, stage) for stage in ordered]
    hops = []
    prices: dict[tuple[str, str, float, float], tuple[float, float, float]] = {}
    # Between nodes the ring leaves and enters by the NICs of all holders on the node.
    on_node: dict[str, list[PlacedStage]] = {}
    for stage in ordered:
        on_node.setdefault(stage.devices[0].node, []).append(stage)
    carriers = {node: _carriers(own) for node, own in on_node.items()}
    # Equal hops are priced once.
    around = zip(ordered, ordered[1:] + ordered[:1], parts, parts[1:] + parts[:1], strict=True)
    for sender, receiver, sent, received in around:
        here, there = sender.devices[0], receiver.devices[0]
        key = here.node, there.node, sent, received
        if key not in prices:
            # Inside a node the larger part of the two shards travels; between nodes the path
            # carries all shards together.
            link = cluster.path(here, there)
            part = share * max(sent, received) if here.node == there.node else share
            # Each rank adds its own part, also behind a shared NIC.
            added_s = adding_s(share * received, 1, link)
            prices[key] = transfer_s(part, link), added_s, link.latency_s
        ends = sender.devices, receiver.devices
        if here.node != there.node:
            ends = carriers[here.node], carriers[there.node]
        hops.append(RingHop(ends, *prices[key]))
    return tuple(hops)


def _carriers(stages: Sequence[PlacedStage]) -> tuple[Device, ...]:
    """Return the GPUs of some holders as often as gives each holder an equal part."""
    # The least number in which each holder's GPUs stand equally often.
    whole = lcm(*(len(stage.devices) for stage in stages))
    return tuple(
        device
        for stage in stages
        for device in stage.devices
        for _ in range(whole // len(stage.devices))
    )


def pass_latency_s(hops: Sequence[RingHop]) -> float:
    """Sum the latencies of a pass, over every hop of the ring but one."""
    return sum(h.latency_s for h in hops) - min(h.latency_s for h in hops)


def ring_key(cluster: Cluster, device: Device) -> tuple[int, Device]:
    """Return the sort key of a ring: sites in the order of the tour through them, then node and
    place in it."""
    return cluster.site_places[cluster.node_by_name[device.node].site], device


def held_fraction(model: ModelSpec, stage: PlacedStage) -> float:
    """Return the largest part of a parameter on any member of a stage."""
    experts = stage.expert_shares
    # Equal shares hold one over the width of everything.
    if stage.shares is None and experts is None:
        return 1 / stage.width
    shares = member_shares(model, stage.width, stage.shares, expert_shares=experts)
    return largest_fraction(model, shares)
