"""A plan's messages on the paths of its cluster.

Inside a node every GPU has a port in each direction; between two nodes there is one path in each
direction, which all GPUs of a node share, and the lines that it leads over, which other pairs of
nodes share too (`cluster.lines`).  All have names that people read: `rtx-0:1 out`,
`a100-0 -> rtx-0`, `line east -> west`.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.names import machine_of, node_words
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.nics import group_seconds
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.schedule.parts import Crossing


def hops(
    cluster: Cluster,
    senders: Sequence[Device],
    receivers: Sequence[Device],
    seconds: float,
    num_bytes: float,
) -> tuple[tuple[str, float], ...]:
    """Return the paths of a message from one group of GPUs to another: (path, seconds for which the
    path is taken).

    Args:
        senders, receivers: the two groups, each on one node.
        seconds: for which it takes what only these two groups, or their nodes, have.
        num_bytes: of it, on the lines that others share, NICs of a machine with several among them.
    """
    # On one node: the groups' own ports, out and in.
    here, there = senders[0].node, receivers[0].node
    if here == there:
        return (f"{group_name(senders)} out", seconds), (f"{group_name(receivers)} in", seconds)
    # Between nodes: lines and NICs, which other traffic shares, at their own bandwidth.
    lines = cluster.lines_beside_nics(here, there)
    shared = [(line.name, num_bytes / line.bytes_per_s) for line in lines]
    shared += group_seconds(cluster, senders, receivers, num_bytes).items()
    # The path of these two nodes, unless something shared on it is always the slower one.
    if has_no_own(cluster, here, there):
        return tuple(shared)
    return (path_name(here, there), seconds), *shared


def path_names(
    cluster: Cluster, senders: Sequence[Device], receivers: Sequence[Device]
) -> tuple[str, ...]:
    """Return the names of the paths of a message from one group to another on a second node."""
    return tuple(name for name, _ in hops(cluster, senders, receivers, 0.0, 0.0))


def has_no_own(cluster: Cluster, here: str, there: str) -> bool:
    """Return whether a message between two nodes waits for shared lines or NICs alone: never for
    the nodes' own path, because a shared line on the way is no faster, or because NICs are all of
    it."""
    if cluster.has_nics and cluster.is_path_of_nics(here, there):
        return True
    lines = cluster.lines_beside_nics(here, there)
    if not lines:
        return False
    link = cluster.node_links[here, there]
    return not link.terms and any(line.bytes_per_s <= link.bytes_per_s for line in lines)


def path_name(here: str, there: str) -> str:
    """Return the name of the path from one node to another; all GPUs of both nodes share the path.
    """
    return f"{node_words(here)} -> {node_words(there)}"


def group_name(devices: Sequence[Device]) -> str:
    """Return the name of a group of GPUs of one node: `rtx-0:0,1`."""
    return f"{machine_of(devices[0].node)}:{','.join(str(d.index) for d in devices)}"


def crossing(
    costs: CostModel, senders: PlacedStage, receivers: PlacedStage, is_stock: bool
) -> Crossing:
    """Price an activation's way from stage to stage.

    In our runtime each byte crosses once, as the cost model prices it.  In stock Megatron every
    rank of the sending stage sends all that it holds to the rank in its own place: its context's
    part of the sequence, and without sequence parallelism all of that part (Megatron's
    `get_tensor_shapes`).

    Args:
        senders, receivers: the two stages.
        is_stock: stock Megatron sends it.
    """
    cluster, ends = costs.cluster, (senders.devices, receivers.devices)
    # Our runtime: every byte crosses once.
    num_bytes: float = costs.activation_bytes
    if not is_stock:
        time = costs.stage_hop(senders, receivers)
        taken = hops(cluster, *ends, time.on_path_s, num_bytes)
        piece_bytes = num_bytes / max(map(len, ends))
        return Crossing(taken, time.latency_s, num_bytes, piece_bytes)
    # Stock Megatron: rank to rank, each with all that it holds.
    num_bytes /= senders.context_parallel
    if costs.workload.training.sequence_parallel:
        num_bytes /= senders.width
    # Groups of a context-parallel stage may lie on several nodes.
    pairs: dict[tuple[str, str], list[tuple[Device, Device]]] = {}
    for sender, receiver in zip(*ends, strict=True):
        pairs.setdefault((sender.node, receiver.node), []).append((sender, receiver))
    taken_by_all: list[tuple[str, float]] = []
    latency_s = most_bytes = 0.0
    for own in pairs.values():
        here, there = zip(*own, strict=True)
        link = cluster.path(here[0], there[0])
        # All pairs between two nodes share the path.
        sent = num_bytes * (len(own) if here[0].node != there[0].node else 1)
        taken_by_all += hops(cluster, here, there, sent / link.bytes_per_s, sent)
        latency_s = max(latency_s, link.latency_s + link.jitter_s)
        most_bytes = max(most_bytes, sent)
    return Crossing(tuple(taken_by_all), latency_s, most_bytes)
