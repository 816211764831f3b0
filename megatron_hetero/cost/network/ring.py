"""The ring over the holders of a gradient buffer, and the price of its hops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.link_terms import adding_s, transfer_s
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.cost.share import largest_fraction, member_shares
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import ModelSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@value(frozen=True)
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
    ordered = ring_order(cluster, stages)
    prices = hop_prices(cluster, model, ordered)
    columns = prices.s_per_byte, prices.adding_s_per_byte, prices.latency_s
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(
        RingHop(ends, *row) for ends, row in zip(ring_ends(ordered), rows, strict=True)
    )


def ring_order(cluster: Cluster, stages: Sequence[PlacedStage]) -> list[PlacedStage]:
    """Return holders in the order of their ring."""
    return sorted(stages, key=lambda stage: ring_key(cluster, stage.devices[0]))


class HopPrices(NamedTuple):
    """The hops of a ring as arrays, shape [hop]: the number of the sender's node
    (`Cluster.link_classes`), and the figures of `RingHop`."""

    nodes: Ints
    s_per_byte: Floats
    adding_s_per_byte: Floats
    latency_s: Floats


def hop_prices(cluster: Cluster, model: ModelSpec, ordered: Sequence[PlacedStage]) -> HopPrices:
    """Price the hop from each holder to the next one of a ring.

    Args:
        model: decides the parts that unlike shares hold.
        ordered: the holders in the order of the ring.
    """
    classes, share = cluster.link_classes, (len(ordered) - 1) / len(ordered)
    # The largest part on one rank of each holder.
    held = np.array([held_fraction(model, stage) for stage in ordered])
    received = np.roll(held, -1)
    nodes = np.array([classes.node_number[stage.devices[0].node] for stage in ordered])
    next_nodes = np.roll(nodes, -1)
    # Inside a node the larger part of the two shards travels; between nodes the path carries all
    # shards together.
    inside = nodes == next_nodes
    parts = np.where(inside, share * np.maximum(held, received), share)
    kinds = classes.of_pairs[nodes, next_nodes]
    # Equal hops are priced once: a large ring has few kinds of them.
    known: dict[tuple[int, float, float], int] = {}
    keys = zip(kinds.tolist(), parts.tolist(), received.tolist(), strict=True)
    own = [known.setdefault(key, len(known)) for key in keys]
    priced = np.array([_hop_price(classes.links[kind], share, *hop) for kind, *hop in known])
    return HopPrices(nodes, *priced[own].T)


def _hop_price(link: Link, share: float, part: float, received: float) -> list[float]:
    # Each rank adds its own part, also behind a shared NIC.
    return [transfer_s(part, link), adding_s(share * received, 1, link), link.latency_s]


def ring_ends(
    ordered: Sequence[PlacedStage],
) -> Iterator[tuple[tuple[Device, ...], tuple[Device, ...]]]:
    """Yield `RingHop.ends` of the hop from each holder to the next one of a ring."""
    # Between nodes the ring leaves and enters by the NICs of all holders on the node.
    on_node: dict[str, list[PlacedStage]] = {}
    for stage in ordered:
        on_node.setdefault(stage.devices[0].node, []).append(stage)
    carriers = {node: _carriers(own) for node, own in on_node.items()}
    for sender, receiver in zip(ordered, [*ordered[1:], *ordered[:1]], strict=True):
        here, there = sender.devices[0].node, receiver.devices[0].node
        is_inside = here == there
        yield (sender.devices, receiver.devices) if is_inside else (carriers[here], carriers[there])


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


def pass_latency_s(latencies_s: Sequence[float]) -> float:
    """Sum the latencies of a pass, over every hop of the ring but one."""
    return sum(latencies_s) - min(latencies_s)


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
