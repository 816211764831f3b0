"""Usable GPUs of a node, and tensor-parallel widths on these."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.fp8_sizes import sizes_without_fp8
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.compute import can_train
from megatron_hetero.model.spec import ModelSpec, Workload


def usable_widths(cluster: Cluster, workload: Workload, node: Node) -> tuple[int, ...]:
    """Return the tensor-parallel widths that node, model and limits allow, ascending; empty when
    the GPU cannot train in the job's precision, or fp8 has no product of the model's sizes."""
    model, fp8 = workload.model, workload.training.fp8
    return tuple(
        w
        for w in _allowed(cluster, workload, node)
        if _divides(w, model) and not (fp8 and any(sizes_without_fp8(model, even_share(model, w))))
    )


def uneven_widths(cluster: Cluster, workload: Workload, node: Node) -> tuple[int, ...]:
    """Return the widths that do not divide the model: groups in shares that differ by a head or
    so."""
    model = workload.model
    # A share of at least one head group and one column of each kind for every GPU.
    most = min(model.num_query_groups, *model.column_kinds)
    return tuple(
        w
        for w in _allowed(cluster, workload, node)
        if w <= most
        and not _divides(w, model)
        and not any(size % w for size in model.divided_latents)
    )


def _allowed(cluster: Cluster, workload: Workload, node: Node) -> Iterator[int]:
    training = workload.training
    if not can_train(training, node.gpu_type):
        return
    # A group stays inside a node; limits may narrow it further.
    widest = min(node.num_gpus, cluster.limits.max_tensor_parallel or node.num_gpus)
    if node.name in cluster.limits.no_tensor_parallel_across:
        widest = 1
    # Sequence parallelism divides each sequence evenly in the group.
    for width in range(1, widest + 1):
        if not (training.sequence_parallel and workload.model.seq_length % width):
            yield width


def _divides(width: int, model: ModelSpec) -> bool:
    units = model.num_attention_heads, model.num_query_groups, *model.column_kinds
    return not any(number % width for number in (*units, *model.divided_latents))


def usable_gpus(cluster: Cluster, node: Node) -> tuple[int, ...]:
    """Return the indices of a node's GPUs that neither the limits nor the library keep idle."""
    # GPUs of another library (NCCL, RCCL) than the cluster's cannot join the job.
    if cluster.library not in (None, node.gpu_type.library):
        return ()
    idle = cluster.limits.idle_devices
    if node.machine in idle:
        return ()
    return tuple(device.index for device in node.devices if device.name not in idle)
