"""Fleets of one symmetric shape over all machines in their order, as HexGen's baseline has them.

HexGen (ICML 2024) calls a pipeline symmetric if all of its stages have one tensor-parallel width
and equally many layers, as FasterTransformer and Accelerate divide a model.  The coordinator of its
engine deals requests to replicas in turn (`benchmark/hexgen_documents/README.md` of
Relaxed-System-Lab/HexGen at `c18c224`).  Here every replica of a fleet has the same such shape, and
ranks are dealt out machine by machine: groups and pipelines go on in the next machine, and at the
next site, where one ends.  GPUs that are left over do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.serving.compose.problem import Composition
from megatron_hetero.serving.fleet.offers import Fleet, OfferedReplica
from megatron_hetero.serving.fleet.shapes import Shape
from megatron_hetero.serving.prices.rates import NOTHING, PhaseRates
from megatron_hetero.serving.prices.steps import PipelinePrice, ReplicaPipeline, ReplicaStage
from megatron_hetero.serving.prices.work import StepWork

DEPTHS = (1, 2, 3, 4, 6, 8, 10, 14, 16)


def fleets_in_order(fleet: Fleet) -> Iterator[Fleet]:
    """Yield a fleet for each width and number of stages of which every replica has room for the
    model; its choices are its replicas."""
    ranks = [node for node in fleet.cluster.nodes for _ in node.devices]
    for width in (1, 2, 4, 8):
        for depth in DEPTHS:
            size = width * depth
            starts = range(0, len(ranks) - size + 1, size)
            replicas = [_replica(fleet, ranks[s : s + size], width) for s in starts]
            offered = [_offered(fleet, pipeline) for pipeline in replicas]
            kept = {f"both: {i}": own for i, own in enumerate(offered) if own is not None}
            if kept and len(kept) == len(replicas):
                yield replace(fleet, offered=kept)


def dealt(fleet: Fleet, rate: float, by_speed: bool) -> Composition | None:
    """Return what each replica serves; None where one of them cannot keep up.

    Args:
        fleet: its choices are its replicas.
        rate: requests per second of all of them.
        by_speed: each by what it can serve; else all equally many.
    """
    able = {name: own.by_class[0].per_s for name, own in fleet.offered.items()}
    parts = able if by_speed else dict.fromkeys(able, 1.0)
    rates = {name: rate * part / sum(parts.values()) for name, part in parts.items()}
    if any(rates[name] > most for name, most in able.items()):
        return None
    shares = {name: (own,) for name, own in rates.items()}
    return Composition(dict.fromkeys(able, 1), shares, {}, {}, 1.0, 0.0, 1.0)


def _replica(fleet: Fleet, nodes: list[Node], width: int) -> ReplicaPipeline:
    """Return the pipeline of GPUs in the order of ranks, given by their machines."""
    total, groups = fleet.served.model.num_layers, [
        nodes[start : start + width] for start in range(0, len(nodes), width)
    ]  # fmt: skip
    stages = []
    for place, group in enumerate(groups):
        num_layers = total // len(groups) + (place < total % len(groups))
        # The slowest card of a group keeps the others waiting; the smallest one bounds its memory.
        slowest = max(group, key=lambda node: _token_s(fleet, node, num_layers)).gpu_type
        memory = min(node.gpu_type.memory_bytes for node in group)
        gpu = replace(slowest, memory_bytes=memory)
        stages.append(ReplicaStage(gpu, width, num_layers, _slowest(fleet.cluster, group)))
    hops = tuple(_slowest(fleet.cluster, [a[-1], b[0]]) for a, b in pairwise(groups))
    return ReplicaPipeline(tuple(stages), hops)


def _token_s(fleet: Fleet, node: Node, num_layers: int) -> float:
    """Return the seconds of a token of decode on one GPU of a machine."""
    pipeline = ReplicaPipeline((ReplicaStage(node.gpu_type, 1, num_layers),))
    served = fleet.served
    layers = replace(served, model=replace(served.model, num_layers=num_layers))
    return PipelinePrice(pipeline, layers, fleet.engine).times(StepWork(1.0, 1.0, 0.0, 128.0))[0]


def _slowest(cluster: Cluster, nodes: list[Node]) -> Link:
    """Return the slowest link between some GPUs, given by their machines."""
    names = sorted({node.name for node in nodes})
    links = [cluster.node_links[a, b] for a in names for b in names if a != b]
    return min(links or [nodes[0].link], key=lambda link: (link.bytes_per_s, -link.latency_s))


def _offered(fleet: Fleet, pipeline: ReplicaPipeline) -> OfferedReplica | None:
    rates = PhaseRates(PipelinePrice(pipeline, fleet.served, fleet.engine))
    own = rates.rate("both", fleet.mix.classes[0])
    if own is NOTHING or not rates.pool.num_blocks:
        return None
    # Its place hands nothing over, as no replica has a phase apart.
    shape = Shape(pipeline, tuple(fleet.pools[0].name for _ in pipeline.stages))
    return OfferedReplica(shape, "both", rates, (own,))
