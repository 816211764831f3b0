"""A plan's messages and gradient exchange on the paths of its cluster.

Inside a node every GPU has a port in each direction; between two nodes there is one path in each
direction, which all GPUs of a node share (`cost.network` says why).  Ports and paths have names
that people read: `rtx-0:1 out`, `a100-0 -> rtx-0`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.cluster.spec import Cluster, Device
from megatron_hetero.cost.memory import state_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.sync import sync_groups
from megatron_hetero.schedule.simulator_engine import Collective, Crossing, StageId


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


def crossing(costs: CostModel, senders: PlacedStage, receivers: PlacedStage) -> Crossing:
    """One activation from one stage to another, as the cost model prices it."""
    time = costs.hop(senders.devices, receivers.devices)
    return Crossing(
        tuple(paths(costs.cluster, senders.devices, receivers.devices)),
        time.serialisation_s,
        time.latency_s,
        costs.activation_bytes,
    )


def gradient_collectives(
    costs: CostModel, placement: Placement, vocab_rows: int
) -> Iterator[Collective]:
    """The gradient exchange after the pipelines, in the order in which every stage runs it.

    One ring all-reduce for each set of holders: 2 (n - 1) / n of the gradients over every hop of
    the ring, at the pace of the slowest.
    """
    model = costs.workload.model
    gradient_bytes = state_bytes(costs.workload.training).gradient
    groups = sorted(
        sync_groups(placement, model, vocab_rows), key=lambda g: (g.holders, g.num_params)
    )
    for group in groups:
        num_bytes = group.num_params * gradient_bytes
        yield _ring(costs.cluster, placement, group.holders, num_bytes)


def _ring(
    cluster: Cluster, placement: Placement, holders: tuple[StageId, ...], num_bytes: float
) -> Collective:
    stages = [placement.replicas[r].stages[s] for r, s in holders]
    stages.sort(key=lambda stage: ring_key(cluster, stage.devices[0]))
    num_ranks = len(stages)
    hop_bytes = 2 * (num_ranks - 1) / num_ranks * num_bytes
    hops = []
    latency_s = 0.0
    for sender, receiver in zip(stages, stages[1:] + stages[:1], strict=True):
        link = cluster.link(sender.devices[0], receiver.devices[0])
        seconds = hop_bytes / link.bytes_per_s
        latency_s = max(latency_s, link.latency_s)
        if sender.devices[0].node == receiver.devices[0].node:
            # The ranks of both groups work side by side, pair by pair.
            seconds /= min(sender.width, receiver.width)
        hops += [(path, seconds) for path in paths(cluster, sender.devices, receiver.devices)]
    return Collective(
        "gradients of " + ", ".join(f"replica {r} stage {s}" for r, s in holders),
        holders,
        tuple(hops),
        2 * (num_ranks - 1) * latency_s,
        num_bytes,
    )


def ring_key(cluster: Cluster, device: Device) -> tuple[str, Device]:
    """A ring visits sites, then nodes, one after the other, as NCCL's own search would."""
    return cluster.node_by_name[device.node].site, device
