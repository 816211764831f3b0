"""A plan of unchanged shape for a model with fewer layers."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.plan.chunks import chain, stage_chunks
from megatron_hetero.plan.plan import LayerRange, Plan, Replica


def with_fewer_layers(plan: Plan, max_layers: int) -> Plan:
    """Scale every replica's cuts to fewer layers; each stage and chunk keeps at least one."""
    old = plan.layout.replicas[0].num_layers
    deepest = max(len(chain(r)) for r in plan.replicas)
    new = min(old, max(max_layers, deepest))
    replicas = tuple(_scale(r, old, new) for r in plan.replicas)
    return replace(plan, replicas=replicas, workload=None, estimates=None)


def _scale(replica: Replica, old: int, new: int) -> Replica:
    # Stages in the order in which the micro-batch passes them, chunk by chunk.
    on_stage = chain(replica)
    ends = sorted(c.first_layer + c.num_layers for s in replica.stages for c in stage_chunks(s))
    chunks: list[list[LayerRange]] = [[] for _ in replica.stages]
    first = 0
    for i, (end, s) in enumerate(zip(ends, on_stage, strict=True)):
        # Leave a layer for this chunk and for each one behind it.
        cut = min(max(round(end * new / old), first + 1), new - (len(ends) - i - 1))
        chunks[s].append(LayerRange(first, cut - first))
        first = cut
    stages = []
    for stage, own in zip(replica.stages, chunks, strict=True):
        num_layers = sum(chunk.num_layers for chunk in own)
        sharded = stage.shape.num_sharded_layers
        if sharded:
            # All, some or none of the layers, as before; alike in all replicas.
            sharded = max(1, sharded * num_layers // stage.shape.num_layers)
        shape = replace(stage.shape, num_layers=num_layers, num_sharded_layers=sharded)
        own_chunks = tuple(own) if stage.chunks else ()
        recomputed = stage.recompute_num_layers
        stages.append(
            replace(
                stage,
                shape=shape,
                first_layer=own[0].first_layer,
                chunks=own_chunks,
                recompute_num_layers=recomputed and min(recomputed, shape.num_layers),
            )
        )
    return replace(replica, stages=tuple(stages))
