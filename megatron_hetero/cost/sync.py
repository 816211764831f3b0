"""Seconds of the gradient exchange between replicas, and between the stages of a tied embedding.

Every run of layers with the same holders is one ring all-reduce over them, on its slowest hop.
Not overlapped with backward in this version: the time is added to the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megatron_hetero.cluster.spec import Cluster, Device
from megatron_hetero.cost.parameters import embedding_params, layer_params
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.spec import ModelSpec


@dataclass(frozen=True)
class SyncGroup:
    """Stages that hold the same parameters, as (replica, stage), and how many (unsharded)."""

    holders: tuple[tuple[int, int], ...]
    num_params: int


def sync_groups(placement: Placement, model: ModelSpec, vocab_rows: int) -> Iterator[SyncGroup]:
    """Parameters by their set of holders; those with a single holder need no exchange."""
    replicas = placement.replicas
    cuts = sorted({start for r in replicas for start in r.first_layers} | {model.num_layers})
    stage_of = [0] * len(replicas)
    per_layer = layer_params(model, even_share(model, 1))
    for first, end in pairwise(cuts):
        for r, replica in enumerate(replicas):
            starts = replica.first_layers
            while stage_of[r] + 1 < len(starts) and starts[stage_of[r] + 1] <= first:
                stage_of[r] += 1
        if len(replicas) > 1:
            yield SyncGroup(tuple(enumerate(stage_of)), (end - first) * per_layer)
    first_stages = tuple((r, 0) for r in range(len(replicas)))
    last_stages = tuple((r, len(replica.stages) - 1) for r, replica in enumerate(replicas))
    positions = embedding_params(model, 1, 0)
    words = vocab_rows * model.hidden_size
    if model.tied_embeddings:
        both = tuple(sorted(set(first_stages + last_stages)))
        if len(both) > 1:
            yield SyncGroup(both, words)
        if len(replicas) > 1 and positions:
            yield SyncGroup(first_stages, positions)
    elif len(replicas) > 1:
        yield SyncGroup(first_stages, words + positions)
        yield SyncGroup(last_stages, words)


def gradient_sync_s(
    placement: Placement,
    cluster: Cluster,
    model: ModelSpec,
    vocab_rows: int,
    gradient_bytes: int,
) -> float:
    """Seconds from the last backward to the last reduced gradient.

    A stage runs its groups one after the other, each at the pace of its slowest hop; the network
    card between two nodes carries the sum of what crosses it.  The answer is the busiest of both.
    """
    stage_s: dict[tuple[int, int], float] = {}
    card_s: dict[tuple[str, str], float] = {}
    for group in sync_groups(placement, model, vocab_rows):
        stages = [placement.replicas[r].stages[s] for r, s in group.holders]
        # The ring visits sites, then nodes, one after the other, as NCCL's own search would.
        stages.sort(key=lambda stage: _ring_key(cluster, stage))
        num_ranks = len(stages)
        hop_bytes = 2 * (num_ranks - 1) / num_ranks * group.num_params * gradient_bytes
        slowest_s = latency_s = 0.0
        for sender, receiver in zip(stages, stages[1:] + stages[:1], strict=True):
            hop_s, hop_latency_s = _hop(cluster, sender, receiver, hop_bytes)
            slowest_s = max(slowest_s, hop_s)
            latency_s = max(latency_s, hop_latency_s)
            nodes = (sender.devices[0].node, receiver.devices[0].node)
            if nodes[0] != nodes[1]:
                card_s[nodes] = card_s.get(nodes, 0.0) + hop_s
        group_s = slowest_s + 2 * (num_ranks - 1) * latency_s
        for holder in group.holders:
            stage_s[holder] = stage_s.get(holder, 0.0) + group_s
    return max([0.0, *stage_s.values(), *card_s.values()])


def _ring_key(cluster: Cluster, stage: PlacedStage) -> tuple[str, Device]:
    device = stage.devices[0]
    return cluster.node_by_name[device.node].site, device


def _hop(
    cluster: Cluster, sender: PlacedStage, receiver: PlacedStage, num_bytes: float
) -> tuple[float, float]:
    """Seconds on the link and its latency; TP ranks work side by side inside a node and share the
    card between nodes."""
    link = cluster.link(sender.devices[0], receiver.devices[0])
    if sender.devices[0].node == receiver.devices[0].node:
        num_bytes /= min(sender.width, receiver.width)
    return num_bytes / link.bytes_per_s, link.latency_s
