"""Rates at which a GPU computes and reads memory, in the job's precision, calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.calibration import (
    Calibration,
    ScoreTraffic,
    product_flops_per_s,
    shipped_calibration,
)
from megatron_hetero.cost.work.products import Product, ProductSpeed
from megatron_hetero.cost.work.traffic import KernelTraffic
from megatron_hetero.model.training import TrainingSpec

_CAST_BYTES = {"tensorwise": 6.0, "delayed": 4.0, "blockwise": 4.0, "mxfp8": 4.0}
"""For each element that Transformer Engine casts to fp8: it is read, and written as it is and
transposed; a scale of the whole tensor as it is now takes another read for its maximum first."""


def cast_bytes(training: TrainingSpec) -> float:
    """Return the bytes moved for each element that a job casts to fp8; 0 without fp8."""
    return _CAST_BYTES[training.fp8_recipe] if training.fp8 else 0.0


def owned_cast_bytes(training: TrainingSpec) -> int:
    """Return the bytes moved by the owner of a weight that is kept in fp8, from its 16-bit copy on:
    read for the largest element, where the scale is of this step, and cast
    (`cast_master_weights_to_fp8`, Transformer Engine 2.20).  `mxfp8` is cast behind the exchange,
    and Adam itself casts where it keeps the main weights."""
    if training.fp8_recipe == "delayed":
        return 0 if training.state_widths else 3
    return 0 if training.fp8_recipe == "mxfp8" else 5


def gathered_cast_bytes(training: TrainingSpec, num_params: int, copies: int) -> int:
    """Return the bytes moved by every device when weights that are kept in fp8 have arrived: copies
    by columns are made of those by rows (`post_all_gather_processing`); `mxfp8` casts both of 16
    bits, and clears what these took of the gradients (`_post_param_sync`, Megatron-core 0.19).

    Args:
        num_params: weights in fp8.
        copies: bytes of the copies.
    """
    return (2 + 2 + 2) * num_params if training.fp8_recipe == "mxfp8" else 2 * copies


class Speed(NamedTuple):
    """Rates of a GPU in the job's precision, calibrated."""

    products: ProductSpeed
    memory_bytes_per_s: float
    mixed_bytes_per_s: float
    scores: ScoreTraffic
    dropout_slowdown: float
    fp8: ProductSpeed | None = None
    cast_bytes: float = 0.0
    kernel_s: float = 0.0

    def products_s(self, products: Sequence[Product]) -> float:
        """Time a sequence of matrix products."""
        return sum(map(self.products.seconds, products))

    def batched_s(self, flops: Sequence[float]) -> float:
        """Time the products of unfused attention, whose traffic is priced with the scores'."""
        overheads_s = len(flops) * self.products.curve.overhead_s
        return sum(flops) / self.products.flops_per_s + overheads_s

    def memory_s(self, num_bytes: float) -> float:
        """Time reading and writing `num_bytes` bytes in all."""
        return num_bytes / self.memory_bytes_per_s

    def moved_s(self, traffic: KernelTraffic) -> float:
        """Time kernels that move so much, one after the other."""
        return traffic.kernels * self.kernel_s + self.memory_s(traffic.num_bytes)

    def mixed_s(self, num_bytes: float) -> float:
        """Time kernels of torch on fp32 logits, or whose operands are unlike in precision."""
        return num_bytes / self.mixed_bytes_per_s


def speed_of(training: TrainingSpec, gpu: GpuType, calibration: Calibration | None = None) -> Speed:
    """Return the rates of a GPU type in the job's precision.

    Args:
        training: decides the precision.
        gpu: the type.
        calibration: constants of GPUs; None is the shipped ones.
    """
    calibration = calibration or shipped_calibration()
    curve = calibration.gemm_efficiency(gpu, training.precision)
    # fp8 products read one byte an element and write the job's own elements.
    element, grouped = training.element_bytes, calibration.grouped
    fp8 = None
    if training.fp8 and (peak := gpu.peak_flops.get("fp8")):
        own = calibration.fp8_efficiency(gpu, training.fp8_recipe)
        fp8 = ProductSpeed(peak, gpu.memory_bytes_per_s, 1.0, own, float(element), grouped)
    return Speed(
        ProductSpeed(
            product_flops_per_s(gpu, training.precision),
            gpu.memory_bytes_per_s,
            element,
            curve,
            element,
            grouped,
        ),
        calibration.memory_bytes_per_s(gpu),
        calibration.mixed_bytes_per_s(gpu),
        calibration.score_traffic["fp32" if training.precision == "fp32" else "fp16"],
        calibration.dropout_slowdown,
        fp8,
        cast_bytes(training),
        calibration.kernel_s,
    )
