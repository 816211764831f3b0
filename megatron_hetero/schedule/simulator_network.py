"""A plan's messages and gradient exchange on the paths of its cluster.

Inside a node every GPU has a port in each direction; between two nodes there is one path in each
direction, which all GPUs of a node share (`cost.network` says why).  Ports and paths have names
that people read: `rtx-0:1 out`, `a100-0 -> rtx-0`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_hetero.cluster.spec import Cluster, Device
from megatron_hetero.cost.memory import state_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.parameters import stage_params
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync import SyncGroup, pass_latency_s, ring, sync_groups
from megatron_hetero.model.spec import ModelSpec
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
        if costs.workload.training.sequence_parallel:
            num_bytes /= senders.width
        if senders.devices[0].node == receivers.devices[0].node:
            return Crossing(taken, num_bytes / link.bytes_per_s, link.latency_s, num_bytes)
        num_bytes *= senders.width
        return Crossing(taken, num_bytes / link.bytes_per_s, link.latency_s, num_bytes)
    time = costs.hop(senders.devices, receivers.devices)
    return Crossing(taken, time.serialisation_s, time.latency_s, num_bytes)


def gradient_collectives(
    costs: CostModel, placement: Placement, vocab_rows: int, is_stock: bool
) -> Iterator[Collective]:
    """The gradient exchange after the pipelines.

    Our runtime has one ring all-reduce for each set of holders (2 (n - 1) / n of the gradients over
    every hop of the ring, at the pace of the slowest), started in the order of the backward pass.
    Stock Megatron has one for each stage over the replicas, and after it one for a tied embedding
    in each replica.
    """
    model = costs.workload.model
    gradient_bytes = state_bytes(costs.workload.training).gradient
    if is_stock:
        groups = list(_stock_groups(placement, model, vocab_rows))
    else:
        groups = list(sync_groups(placement, model, vocab_rows))
    for group in groups:
        num_bytes = group.num_params * gradient_bytes
        collective = _ring(costs, placement, group.holders, num_bytes)
        yield replace(collective, in_turn=is_stock)


def _stock_groups(placement: Placement, model: ModelSpec, vocab_rows: int) -> Iterator[SyncGroup]:
    replicas = placement.replicas
    num_stages = len(replicas[0].stages)
    for s, stage in enumerate(replicas[0].stages):
        if len(replicas) > 1:
            first, last = s == 0, s == num_stages - 1
            share = even_share(model, 1)
            params = stage_params(model, share, stage.num_layers, first, last, vocab_rows)
            yield SyncGroup(tuple((r, s) for r in range(len(replicas))), params)
    if model.tied_embeddings and num_stages > 1:
        for r in range(len(replicas)):
            yield SyncGroup(((r, 0), (r, num_stages - 1)), vocab_rows * model.hidden_size)


def _ring(
    costs: CostModel, placement: Placement, holders: tuple[StageId, ...], num_bytes: float
) -> Collective:
    """A ring over the first ranks of the holders; the others work beside them, pair by pair."""
    stages = [placement.replicas[r].stages[s] for r, s in holders]
    cluster = costs.cluster
    ring_hops = ring(cluster, costs.workload.model, stages)
    hops = [
        (path, 2 * hop.s_per_byte * num_bytes)
        for hop in ring_hops
        for path in paths(cluster, hop.sender.devices, hop.receiver.devices)
    ]
    return Collective(
        "gradients of " + ", ".join(f"replica {r} stage {s}" for r, s in holders),
        holders,
        tuple(hops),
        2 * pass_latency_s(ring_hops),
        num_bytes,
    )
