"""Exact minimax split of decoder layers over unequal stages with memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from megatron_hetero.kernels import KERNELS


def split_layers(
    num_layers: int,
    layer_times_s: Sequence[float],
    base_times_s: Sequence[float],
    max_layers: Sequence[int],
) -> tuple[int, ...] | None:
    """Return layers per stage such that the slowest stage is as fast as possible; None if none
    fits.

    Stage i with n layers takes `base_times_s[i] + n * layer_times_s[i]`.  Layers are equal and
    times grow with each, so giving one at a time to the stage that then ends first is optimal: any
    other split takes a layer from one stage and gives it to another, and the greedy rule has
    already passed over that other because it would have ended later.

    Args:
        layer_times_s: seconds of one layer, shape [stage].
        base_times_s: seconds of a stage without layers (embedding, head), shape [stage].
        max_layers: layers that fit into memory, shape [stage].
    Returns:
        Layers per stage, each at least 1, summing to `num_layers`.
    """
    num_stages = len(layer_times_s)
    # Each stage needs a layer, and all stages together have room for all layers.
    if num_stages > num_layers or min(max_layers) < 1 or sum(max_layers) < num_layers:
        return None
    layers = [1] * num_stages
    # Among equals the later stage, which keeps fewer micro-batches, takes the layer.
    heap = [
        (base_times_s[i] + 2 * layer_times_s[i], -i) for i in range(num_stages) if max_layers[i] > 1
    ]
    heapify(heap)
    # One layer at a time to the stage that then ends first.
    for _ in range(num_layers - num_stages):
        time_s, key = heappop(heap)
        layers[-key] += 1
        if layers[-key] < max_layers[-key]:
            heappush(heap, (time_s + layer_times_s[-key], key))
    return tuple(layers)


def minimax(num_layers: int, times_s: Sequence[Sequence[float]]) -> tuple[int, ...] | None:
    """Return layers by stage, each at least 1, such that the slowest stage is as fast as possible;
    None if they do not fit.

    Args:
        times_s: seconds with 1, 2, ... layers, rising, as many as fit, shape [stage][layers - 1].
    """
    # The compiled loop does the same, faster.
    if KERNELS is not None:
        return KERNELS.divide_layers(num_layers, times_s, (), 1, 0)
    num_stages = len(times_s)
    if num_stages > num_layers or any(not times for times in times_s):
        return None
    if sum(len(times) for times in times_s) < num_layers:
        return None
    layers = [1] * num_stages
    # Among equals the later stage, which keeps fewer micro-batches, takes the layer.
    heap = [(times[1], -i) for i, times in enumerate(times_s) if len(times) > 1]
    heapify(heap)
    for _ in range(num_layers - num_stages):
        _, key = heappop(heap)
        layers[-key] += 1
        if layers[-key] < len(times_s[-key]):
            heappush(heap, (times_s[-key][layers[-key]], key))
    return tuple(layers)
