"""Reads the measured table of casts, and fits what kernels take that memory alone bounds.

`benchmarks/tables/casts.csv` holds microseconds by GPU type and shape of kernels that read a matrix
of 16 bits, scale it and write it in fp8, a column for each serving engine.  A kernel takes a fixed
time and its bytes at a part of the memory bandwidth.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from product_tables import TABLES

from megatron_hetero.cluster.catalogue import gpu_type

_BYTES = 3
"""Of an element that is read in 16 bits and written in 8."""
_FEW, _LARGE = 1 << 17, 1 << 26
"""Elements: up to the one a kernel takes its fixed time, from the other on no cache holds them."""


@dataclass(frozen=True)
class CastPoint:
    """One shape on one GPU type, with the seconds of each engine."""

    gpu: str
    elements: int
    by_engine: Mapping[str, float]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are read and written."""
        return _BYTES * self.elements

    @property
    def seconds(self) -> float:
        """Return the median of the engines."""
        return statistics.median(self.by_engine.values())


@cache
def cast_points() -> tuple[CastPoint, ...]:
    """Read the table."""
    with (TABLES / "casts.csv").open(newline="", encoding="utf-8") as file:
        found = []
        for row in csv.DictReader(file):
            gpu, rows, columns = (row.pop(name) for name in ("gpu", "rows", "columns"))
            times = {engine: 1e-6 * float(cell) for engine, cell in row.items() if cell}
            found.append(CastPoint(gpu, int(rows) * int(columns), times))
        return tuple(found)


def large_casts(points: Sequence[CastPoint]) -> list[CastPoint]:
    """Return the casts of more than any cache holds."""
    return [point for point in points if point.elements >= _LARGE]


def fit_kernel_s(points: Sequence[CastPoint]) -> float:
    """Return the seconds of a kernel that moves next to nothing: nearly the same on all cards."""
    return float(f"{statistics.median(p.seconds for p in points if p.elements <= _FEW):.2e}")


def fit_bandwidths(points: Sequence[CastPoint]) -> dict[str, float]:
    """Return the part of the memory bandwidth that large casts reach, by GPU type."""
    kernel_s, found = fit_kernel_s(points), dict[str, list[float]]()
    for point in large_casts(points):
        rate = point.num_bytes / (point.seconds - kernel_s)
        found.setdefault(point.gpu, []).append(rate / gpu_type(point.gpu).memory_bytes_per_s)
    return {gpu: round(statistics.median(parts), 3) for gpu, parts in found.items()}
