"""Which GPUs of a node, and which tensor-parallel widths on them, a plan may use at all."""

from __future__ import annotations

from megatron_hetero.cluster.spec import Cluster, Node
from megatron_hetero.cost.compute import can_train
from megatron_hetero.model.spec import Workload


def usable_widths(cluster: Cluster, workload: Workload, node: Node) -> tuple[int, ...]:
    """Tensor-parallel widths that node, model and limits allow, ascending; empty when the GPU
    cannot train in the job's precision."""
    model, training = workload.model, workload.training
    if not can_train(training, node.gpu_type):
        return ()
    widest = min(node.num_gpus, cluster.limits.max_tensor_parallel or node.num_gpus)
    if node.name in cluster.limits.no_tensor_parallel_across:
        widest = 1
    return tuple(
        width
        for width in range(1, widest + 1)
        if model.num_attention_heads % width == 0
        and model.num_query_groups % width == 0
        and model.mlp_columns % width == 0
        and not (training.sequence_parallel and model.seq_length % width)
    )


def usable_gpus(cluster: Cluster, node: Node) -> tuple[int, ...]:
    """Indices of the GPUs of a node that the limits do not keep idle."""
    idle = cluster.limits.idle_devices
    if node.name in idle:
        return ()
    return tuple(i for i in range(node.num_gpus) if f"{node.name}:{i}" not in idle)
