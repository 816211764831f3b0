"""Reads the measured tables of matrix products, and fits the constants of `cost.work.products`.

`benchmarks/tables/products.csv` holds microseconds by GPU type, data type and shape, a column for
each serving engine: its newest version, and its oldest.  The engines call the libraries of their
day and differ by 3 to 9 %, so a shape's time is the median of the newest versions.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.calibration import product_flops_per_s
from megatron_hetero.cost.work.products import GemmEfficiency, Product, ProductSpeed

TABLES = Path(__file__).resolve().parent.parent / "benchmarks" / "tables"
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0}
"""Of an element of a factor; results are in 16 bits."""
CAST_BYTES = {"bfloat16": 0.0, "fp8": 5.0, "fp8_block": 3.0}
"""For each element of the tokens, moved within the timed call before the product: all engines cast
them there (`forward` of a quantized linear layer, without scales of activations), after a read for
the tensor's maximum where it has one scale (aiconfigurator, `collector/*/collect_gemm.py`)."""
KINDS = {"bfloat16": "fp16", "fp8": "fp8", "fp8_block": "fp8_block"}
"""Names in `calibration.json`."""
LARGE = 2048
"""Least size of each side of a large product."""
_FEW_ROWS = 16
"""Of products that take as long as reading their weights; no part of the fit of products."""


def is_new(column: str) -> bool:
    """Tell if a column is of an engine's newest version."""
    return column.endswith("-new")


def is_cublas(column: str) -> bool:
    """Tell if a column is of the engine whose fp8 products are cuBLASLt's; the other two have
    CUTLASS kernels of their own."""
    return column == "trtllm-new"


@dataclass(frozen=True)
class ProductPoint:
    """One product on one GPU type: microseconds of each engine, by column of the table."""

    gpu: GpuType
    dtype: str
    product: Product
    by_engine: tuple[tuple[str, float], ...]

    def seconds(self, uses: Callable[[str], bool] | None = None) -> float:
        """Return the median of some engines, without the cast of the tokens; 0 where none of them
        has the shape.

        Args:
            uses: tells by the column; None is the newest versions, and of fp8 with a scale for a
                whole tensor the engine that calls cuBLASLt, as Transformer Engine does.
        """
        uses = uses or (is_cublas if self.dtype == "fp8" else is_new)
        own = [time for column, time in self.by_engine if uses(column)]
        if not own:
            return 0.0
        cast_s = CAST_BYTES[self.dtype] * self.product.inputs / self.gpu.memory_bytes_per_s
        return 1e-6 * statistics.median(own) - cast_s

    @property
    def is_large(self) -> bool:
        """Return whether all three sides are large."""
        return min(self.product.rows, self.product.columns, self.product.depth) >= LARGE


@cache
def product_points(dtype: str = "bfloat16") -> tuple[ProductPoint, ...]:
    """Read the table of a data type, products of few rows left out."""
    return tuple(
        p for p in _all_points() if p.dtype == dtype and p.product.rows > _FEW_ROWS and p.seconds()
    )


@cache
def _all_points() -> tuple[ProductPoint, ...]:
    with (TABLES / "products.csv").open(newline="", encoding="utf-8") as file:
        found = []
        for row in csv.DictReader(file):
            gpu, dtype, m, n, k = (row.pop(name) for name in ("gpu", "dtype", "m", "n", "k"))
            times = tuple((column, float(cell)) for column, cell in row.items() if cell)
            product = Product(float(m), float(n), float(k))
            found.append(ProductPoint(gpu_type(gpu), dtype, product, times))
        return tuple(found)


def speed_of(gpu: GpuType, curve: GemmEfficiency, dtype: str = "bfloat16") -> ProductSpeed:
    """Return the speed of products of a type with some constants."""
    peak = product_flops_per_s(gpu, "bf16" if dtype == "bfloat16" else "fp8")
    return ProductSpeed(peak, gpu.memory_bytes_per_s, BYTES[dtype], curve)


def fit_products(
    points: Sequence[ProductPoint], seconds: Sequence[float] | None = None
) -> GemmEfficiency:
    """Fit the four constants of one GPU type, by least squares of relative errors.

    Args:
        points: of its table.
        seconds: what each took; None is the median of the newest engines.
    """
    seconds = seconds or [point.seconds() for point in points]
    gpu, dtype = points[0].gpu, points[0].dtype
    # A large product weighs more: a layer's time is that of its large ones.
    weights = np.array([1.0 if point.is_large else 0.5 for point in points])

    def errors(logs: Sequence[float]) -> np.ndarray:
        speed = speed_of(gpu, _curve(logs), dtype)
        ratios = [
            speed.seconds(point.product) / time_s
            for point, time_s in zip(points, seconds, strict=True)
        ]
        return weights * np.log(ratios)

    start = [np.log(0.8), np.log(3e-6), np.log(0.5), 0.03]
    no_faster = ([-np.inf] * 3 + [0.0], [np.inf] * 4)
    best = least_squares(errors, start, bounds=no_faster, loss="soft_l1", f_scale=0.1).x
    found = _curve(best)
    return GemmEfficiency(
        round(found.max_efficiency, 4),
        round(found.overhead_s, 8),
        round(found.traffic, 3),
        round(found.decline, 4),
    )


def _curve(logs: Sequence[float]) -> GemmEfficiency:
    efficiency, overhead_s, traffic = np.exp(logs[:3]).tolist()
    return GemmEfficiency(efficiency, overhead_s, traffic, float(logs[3]))


def by_gpu(points: Sequence[ProductPoint]) -> dict[str, list[ProductPoint]]:
    """Group points by GPU type."""
    found: dict[str, list[ProductPoint]] = {}
    for point in points:
        found.setdefault(point.gpu.name, []).append(point)
    return found


def reading_efficiency() -> dict[str, float]:
    """Return the part of the memory bandwidth that reading weights reaches, by GPU type: the
    products of few rows, whose weights no cache holds."""
    found: dict[str, list[float]] = {}
    for point in _all_points():
        product = point.product
        if product.rows == _FEW_ROWS and product.columns * product.depth >= 1 << 29:
            bytes_per_s = product.num_bytes(2.0, 2.0) / point.seconds()
            found.setdefault(point.gpu.name, []).append(bytes_per_s / point.gpu.memory_bytes_per_s)
    return {gpu: round(statistics.median(parts), 3) for gpu, parts in found.items()}


def sources() -> list[str]:
    """Name each file of the tables, with its commit and licence."""
    about = json.loads((TABLES / "kernels.json").read_text(encoding="utf-8"))
    return [
        f"{name}, {gpu}, {column}: {about['repository']} {path} ({about['licence']})"
        for name in ("products.csv", "experts.csv", "casts.csv")
        for gpu, columns in about[name]["columns"].items()
        for column, path in columns.items()
        if not column.endswith("-old")
    ]
