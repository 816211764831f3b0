"""Orders of a replica: layers dealt along a chain, interleaved 1F1B, split backward passes."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.plan import LayerRange, Plan
from megatron_hetero.schedule.of_plan import with_schedule
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.orders.list_schedule import TimedPipeline
from megatron_hetero.schedule.orders.zero_bubble import zero_bubble
from megatron_hetero.schedule.parts import ChunkTimes


def with_chunks(plan: Plan, replica: int, layers: list[tuple[int, int]]) -> Plan:
    """Deal a replica's layers out along a chain of (stage, number of layers)."""
    ranges: dict[int, list[LayerRange]] = {}
    first = 0
    # Layers follow each other along the chain, whichever stage a link of the chain is on.
    for stage, num_layers in layers:
        ranges.setdefault(stage, []).append(LayerRange(first, num_layers))
        first += num_layers
    # A stage with a single range is a plain stage, without chunks.
    stages = tuple(
        replace(
            stage,
            first_layer=ranges[s][0].first_layer,
            shape=replace(stage.shape, num_layers=sum(r.num_layers for r in ranges[s])),
            chunks=tuple(ranges[s]) if len(ranges[s]) > 1 else (),
        )
        for s, stage in enumerate(plan.replicas[replica].stages)
    )
    replicas = list(plan.replicas)
    replicas[replica] = replace(replicas[replica], stages=stages)
    return replace(plan, replicas=tuple(replicas))


def with_interleaving(plan: Plan, replica: int, layers: list[tuple[int, int]]) -> Plan:
    """Deal a replica's layers out as `with_chunks` does, and run them as interleaved 1F1B."""
    chunked = with_chunks(plan, replica, layers)
    shape = chunked.replicas[replica]
    schedule = interleaved(chain(shape), shape.num_micro_batches)
    return with_schedule(chunked, replica, schedule, "interleaved")


def with_zero_bubble(plan: Plan, replica: int, limits: list[int]) -> Plan:
    """Split a replica's backward passes; `limits[s]`: most micro-batches that stage s holds."""
    shape = plan.replicas[replica]
    on_stage = chain(shape)
    hops = (BoundaryTime(0.0, 0.5),) * (len(on_stage) - 1)
    # Units of time in place of seconds: the order is under test, not its speed.
    times = tuple((ChunkTimes(1.0, 1.0, 1.0),) * on_stage.count(s) for s in range(len(limits)))
    pipeline = TimedPipeline(on_stage, shape.num_micro_batches, times, hops, hops)
    return with_schedule(plan, replica, zero_bubble(pipeline, limits).schedule, "zero-bubble")
