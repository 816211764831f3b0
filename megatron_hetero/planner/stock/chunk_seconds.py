"""Seconds of the passes of a stage's chunks, for many divisions of the layers at once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megatron_hetero.model.blocks import blocks
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.stock.divisions import Divisions
from megatron_hetero.planner.stock.place import StockPlace
from megatron_hetero.schedule.simulator.relaxed import ChunkSeconds


@lru_cache(maxsize=16)
def chunk_flops(workload: Workload) -> tuple[float, float]:
    """Return FLOPs of a layer and of the head, by which chunks divide a stage's seconds
    (`schedule.orders.chunk_times`)."""
    _, layer, *_, head = blocks(workload)
    layer_flops, head_flops = (
        b.matmul_flops_forward + b.attention_flops_forward for b in (layer, head)
    )
    return layer_flops, head_flops


def chunk_seconds(
    workload: Workload, place: StockPlace, held: Divisions, again: Divisions, *, is_last: bool
) -> list[ChunkSeconds]:
    """Return the seconds of a stage's passes, divided among the chunks by FLOPs.

    Args:
        workload: the job.
        place: times of the stage.
        held: layers of each chunk, [division, chunk].
        again: layers of the stage that are recomputed, [division].
        is_last: the stage has the head, on its last chunk.
    """
    num_layers = held.sum(axis=1)
    base, each = place.times
    forward_s = base.forward_s + each.forward_s * num_layers
    backward_s = base.backward_s + each.backward_s * num_layers + place.recomputed_s * again
    if held.shape[1] == 1:
        return [(np.asarray(forward_s), np.asarray(backward_s))]
    # FLOPs decide the parts.
    layer_flops, head_flops = chunk_flops(workload)
    head_flops *= is_last
    total = num_layers * layer_flops + head_flops
    found = []
    for chunk, own in enumerate(held.T):
        flops = own * layer_flops
        if chunk + 1 == held.shape[1]:
            flops = flops + head_flops
        found.append((forward_s * flops / total, backward_s * flops / total))
    return found
