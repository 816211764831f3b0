"""Reads the measured tables of experts, and fits what grouped products take besides their FLOPs.

`benchmarks/tables/experts.csv` holds microseconds of whole layers of gated experts in bf16, tokens
spread evenly: sorting, both grouped products, activation and the weighted sum, as two serving
engines run them (CUTLASS and Triton).
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from product_tables import TABLES
from scipy.optimize import least_squares

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.calibration import Calibration, product_flops_per_s
from megatron_hetero.cost.work.products import GroupedCall, Product, ProductSpeed

ENGINES = ("trtllm", "vllm")


@dataclass(frozen=True)
class ExpertPoint:
    """A layer of experts on one GPU."""

    gpu: GpuType
    tokens: int
    products: tuple[Product, Product]
    moved_bytes: float
    """Read and written between the products, and to sort and sum tokens."""
    seconds: float


@cache
def expert_points() -> tuple[ExpertPoint, ...]:
    """Read the table; a shape's time is the median of its engines."""
    found = []
    with (TABLES / "experts.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tokens, hidden, ffn, topk, experts = (
                int(row[name]) for name in ("tokens", "hidden", "ffn", "topk", "experts")
            )
            routed = tokens * topk
            products = (
                Product(routed / experts, 2 * ffn, hidden, experts, is_grouped=True),
                Product(routed / experts, hidden, ffn, experts, is_grouped=True),
            )
            times = [float(row[engine]) for engine in ENGINES if row[engine]]
            # The activation reads two and writes one; these kernels read tokens where they lie.
            moved = 2.0 * routed * (3 * ffn + hidden)
            found.append(
                ExpertPoint(
                    gpu_type(row["gpu"]), tokens, products, moved, 1e-6 * statistics.median(times)
                )
            )
    return tuple(found)


def predict_experts(point: ExpertPoint, grouped: GroupedCall, calibration: Calibration) -> float:
    """Predict the seconds of a layer of experts."""
    curve = calibration.gemm_efficiency(point.gpu, "bf16")
    peak = product_flops_per_s(point.gpu, "bf16")
    speed = ProductSpeed(peak, point.gpu.memory_bytes_per_s, 2.0, curve, 2.0, grouped)
    moved_s = point.moved_bytes / calibration.memory_bytes_per_s(point.gpu)
    return sum(map(speed.seconds, point.products)) + moved_s


def fit_experts(points: Sequence[ExpertPoint], data: dict[str, Any]) -> dict[str, float]:
    """Fit the part `grouped` of `calibration.json`, relative to the products of `data`."""
    calibration = Calibration.from_data(data)

    def errors(logs: Sequence[float]) -> list[float]:
        grouped = GroupedCall(*map(math.exp, logs))
        return [
            math.log(predict_experts(point, grouped, calibration) / point.seconds)
            for point in points
        ]

    best = least_squares(errors, [0.0, math.log(3e-5)], loss="soft_l1", f_scale=0.1).x
    return {"traffic": round(math.exp(best[0]), 3), "call_s": round(math.exp(best[1]), 7)}
