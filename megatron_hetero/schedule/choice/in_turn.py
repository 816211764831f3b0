"""A replica's layers in chunks of like size, dealt out along its stages in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hetero.plan.plan import LayerRange, Replica


def in_turn(replica: Replica, num_chunks: int) -> Replica:
    """Divide each stage's layers into `num_chunks` chunks of like size, dealt out along the
    stages."""
    sizes = [list(_parts(stage.shape.num_layers, num_chunks)) for stage in replica.stages]
    # Layers rise along the chain: all stages' first chunks, then all second ones.
    ranges: list[list[LayerRange]] = [[] for _ in replica.stages]
    first = 0
    for chunk in range(num_chunks):
        for s, size in enumerate(sizes):
            ranges[s].append(LayerRange(first, size[chunk]))
            first += size[chunk]
    stages = tuple(
        replace(
            stage,
            first_layer=own[0].first_layer,
            chunks=tuple(own) if num_chunks > 1 else (),
            num_launched_forwards=None,
        )
        for stage, own in zip(replica.stages, ranges, strict=True)
    )
    return replace(replica, stages=stages)


def _parts(total: int, count: int) -> Iterator[int]:
    """Divide `total` into `count` parts, the larger ones first."""
    for i in range(count):
        yield total // count + (i < total % count)
