"""Seconds of what is done to gradients of weights beside products: their sums, and the update."""

from __future__ import annotations

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.calibration import shipped_calibration
from megatron_hetero.cost.work.speed import Speed
from megatron_hetero.model.training import TrainingSpec


def update_time_s(traffic_bytes: float, gpu: GpuType) -> float:
    """Time the optimizer step on one device (`update_traffic_bytes`)."""
    return traffic_bytes / shipped_calibration().memory_bytes_per_s(gpu)


def gradient_accumulation_s(num_params: int, speed: Speed, training: TrainingSpec) -> float:
    """Time adding the gradients that products give for so many weights to the main gradients, in
    their precision: within the product, unless the job keeps the two apart."""
    if training.unfused_gradients:
        return added_gradient_s(num_params, speed, training)
    return speed.memory_s(2.0 * num_params * training.gradient_bytes)


def added_gradient_s(num_params: int, speed: Speed, training: TrainingSpec) -> float:
    """Time adding gradients that lie apart, in the job's elements, to the main gradients.

    The hook of a parameter reads both and writes one:
    `DistributedDataParallel._make_backward_post_hook` (`main_grad.add_`) of Megatron-core 0.19.
    What wrote the gradient is priced with its traffic
    (`LinearWithGradAccumulationAndAsyncCommunication.backward`, `grad_output.t().matmul`; in
    Transformer Engine's layers `fuse_wgrad_accumulation`).
    """
    main, own = training.gradient_bytes, training.element_bytes
    time_s = speed.memory_s if main == own else speed.mixed_s
    return time_s(num_params * (2.0 * main + own))
