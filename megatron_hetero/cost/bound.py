"""A lower bound on the step time of every plan: all work, perfectly divided over all GPUs."""

from __future__ import annotations

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.widths import usable_gpus

BOUND_RELAXES = (
    "memory, whole layers and micro-batches, pipeline fill, stage boundaries, gradient exchange, "
    "update"
)


def step_time_bound_s(costs: CostModel) -> float:
    """No placement of the space is faster, by the same cost model.

    A device that spends all of a step of T seconds on layers completes at most T / y of them, y
    being its GPU-seconds for one layer at the best width.  A head costs at least `ratio` layers on
    any device, so num_micro_batches * (num_layers + ratio) <= sum T / y.  A step also lasts at
    least one micro-batch's way through the model on the fastest stages.
    """
    workload, cluster = costs.workload, costs.cluster
    layers_per_s = 0.0
    ratio = fastest_layer_s = fastest_head_s = float("inf")
    for node in cluster.nodes:
        num_gpus = len(usable_gpus(cluster, node))
        widths = [w for w in costs.widths(node) if w <= num_gpus]
        if not widths:
            continue
        # The unpadded vocabulary is the least that any plan computes.
        pieces = {w: costs.pieces(node, w, workload.model.vocab_size) for w in widths}
        gpu_seconds = min(w * p.layer.total_s for w, p in pieces.items())
        head_gpu_seconds = min(w * p.head.total_s for w, p in pieces.items())
        layers_per_s += num_gpus / gpu_seconds
        ratio = min(ratio, head_gpu_seconds / gpu_seconds)
        fastest_layer_s = min([fastest_layer_s, *(p.layer.total_s for p in pieces.values())])
        fastest_head_s = min([fastest_head_s, *(p.head.total_s for p in pieces.values())])
    if not layers_per_s:
        return 0.0
    training, num_layers = workload.training, workload.model.num_layers
    num_micro_batches = training.global_batch_size // training.micro_batch_size
    work_s = num_micro_batches * (num_layers + ratio) / layers_per_s
    return max(work_s, num_layers * fastest_layer_s + fastest_head_s)
