"""The chain of model chunks of a replica: the stage of each piece of the model, in order."""

from __future__ import annotations

from megatron_hetero.plan.plan import LayerRange, Replica, Stage


def stage_chunks(stage: Stage) -> tuple[LayerRange, ...]:
    """Return a stage's pieces of the model; the whole stage if no chunks are named."""
    return stage.chunks or (LayerRange(stage.first_layer, stage.shape.num_layers),)


def layer_ranges(stage: Stage) -> str:
    """Write the layers of a stage in words: `0-4`, `3`, or of chunks `0-2, 9-10`."""
    return ", ".join(
        str(chunk.first_layer)
        if chunk.num_layers == 1
        else f"{chunk.first_layer}-{chunk.first_layer + chunk.num_layers - 1}"
        for chunk in stage_chunks(stage)
    )


def chain(replica: Replica) -> tuple[int, ...]:
    """Return the stage of each virtual stage, in the order of the layers; one chunk on each stage
    is 0, 1, ..."""
    if not any(stage.chunks for stage in replica.stages):
        return tuple(range(len(replica.stages)))
    pieces = [
        (chunk.first_layer, s)
        for s, stage in enumerate(replica.stages)
        for chunk in stage_chunks(stage)
    ]
    return tuple(s for _, s in sorted(pieces))
