"""Model FLOPs utilization (MFU): the model's FLOPs in a step over the GPUs' peak.

The definition of PaLM (Chowdhery et al. 2022, appendix B): the FLOPs of the model itself, forward
and backward, without those that recompute repeats, over the dense peak of the GPUs.  Causal
attention counts the half of the scores that is computed (`model.blocks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.compute import peak_flops_per_s
from megatron_hetero.model.blocks import blocks
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan

# Backward has two products for each one of forward.
_FORWARD_AND_BACKWARD = 3
# Peaks of GPUs that lack one are taken from the other.
_HALF_PRECISIONS = ("bf16", "fp16")
MFU_MEANS = "model FLOPs without recompute over dense peak FLOPs in the job's precision"


@dataclass(frozen=True)
class Utilization:
    """Use of the GPUs in one step: `mfu` beside the peak of the GPUs in use, `mfu_of_cluster`
    beside that of all GPUs of the cluster; None where the data sheet of a GPU among them gives no
    peak."""

    model_flops: float
    flops_per_s_per_gpu: float
    mfu: float | None
    mfu_of_cluster: float | None


def model_flops_per_step(workload: Workload) -> float:
    """Sum the FLOPs of the model in one step, forward and backward, without recompute."""
    forward = sum(b.matmul_flops_forward + b.attention_flops_forward for b in blocks(workload))
    return _FORWARD_AND_BACKWARD * forward * workload.training.global_batch_size


def utilization_of(
    plan: Plan, cluster: Cluster, step_time_s: float | None = None
) -> Utilization | None:
    """Compute how well a plan uses the GPUs; None without a workload or a step time.

    Args:
        plan: its devices are of `cluster`.
        step_time_s: by default that of the plan's estimates.
    """
    # A plan without estimates and a layout without devices have no utilization.
    if step_time_s is None and plan.estimates is not None:
        step_time_s = plan.estimates.step_time_s
    if plan.workload is None or step_time_s is None:
        return None
    # GPUs in use may be fewer than the cluster's; the rate is by GPU in use.
    known = {device.name: cluster.gpu_type(device) for device in cluster.devices}
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    used = [known[name] for stage in stages for name in stage.devices if name in known]
    if not used:
        return None
    flops = model_flops_per_step(plan.workload)
    precision = plan.workload.training.precision
    peak, cluster_peak = _peak(used, precision), _peak(known.values(), precision)
    rate = flops / step_time_s
    return Utilization(
        flops,
        rate / len(used),
        rate / peak if peak else None,
        rate / cluster_peak if cluster_peak else None,
    )


def _peak(gpus: Iterable[GpuType], precision: str) -> float | None:
    """Sum the peaks of some GPUs; one that lacks the job's half precision (V100 in bf16) counts
    with the other.  None if a GPU has neither."""
    kinds = (precision, *(k for k in _HALF_PRECISIONS if precision in _HALF_PRECISIONS))
    total = 0.0
    for gpu in gpus:
        peaks = [peak for kind in kinds if (peak := peak_flops_per_s(gpu, kind)) is not None]
        if not peaks:
            return None
        total += peaks[0]
    return total
