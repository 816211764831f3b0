"""A plan's messages on the paths of its cluster.

Inside a node every GPU has a port in each direction; between two nodes there is one path in each
direction, which all GPUs of a node share (`cost.network` says why).  Ports and paths have names
that people read: `rtx-0:1 out`, `a100-0 -> rtx-0`.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.spec import Cluster, Device
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.schedule.simulator_parts import Crossing


def paths(cluster: Cluster, senders: Sequence[Device], receivers: Sequence[Device]) -> list[str]:
    """What a message from one group of GPUs to another takes."""
    here, there = senders[0].node, receivers[0].node
    if here != there:
        return [path_between(here, there)]
    return [f"{group_name(senders)} out", f"{group_name(receivers)} in"]


def path_between(here: str, there: str) -> str:
    """Name of the path from one node to another."""
    return f"{here} -> {there}"


def group_name(devices: Sequence[Device]) -> str:
    """GPUs of one node: `rtx-0:0,1`."""
    return f"{devices[0].node}:{','.join(str(d.index) for d in devices)}"


def crossing(
    costs: CostModel, senders: PlacedStage, receivers: PlacedStage, is_stock: bool
) -> Crossing:
    """One activation from one stage to another.

    In our runtime each byte crosses once, as the cost model prices it.  In stock Megatron every
    rank of the sending stage sends all that it holds to the rank in its own place: without sequence
    parallelism that is the whole activation from each.
    """
    taken = tuple(paths(costs.cluster, senders.devices, receivers.devices))
    num_bytes: float = costs.activation_bytes
    if is_stock:
        link = costs.cluster.link(senders.devices[0], receivers.devices[0])
        late_s = link.latency_s + link.jitter_s
        if costs.workload.training.sequence_parallel:
            num_bytes /= senders.width
        if senders.devices[0].node == receivers.devices[0].node:
            return Crossing(taken, num_bytes / link.bytes_per_s, late_s, num_bytes)
        num_bytes *= senders.width
        return Crossing(taken, num_bytes / link.bytes_per_s, late_s, num_bytes)
    time = costs.stage_hop(senders, receivers)
    return Crossing(taken, time.serialisation_s, time.latency_s, num_bytes)
