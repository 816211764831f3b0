"""Seconds of a matrix product on one GPU: its FLOPs, its memory traffic and a fixed cost.

Three terms that add up fit measured tables of GEMMs of today's cards (`tools/cost_holdout.py`
prints how well): the FLOPs at a rate that falls slowly with them (long products draw more power,
and clocks fall), both factors and the result through memory once, and a fixed cost.  Tiles that do
not fill a last wave of multiprocessors were tried as well: the mean error over all tables fell by
0.3 points, so they are not modelled.

The two products of backward have the FLOPs and the three matrices of that of forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_TERA = 1e12


class Product(NamedTuple):
    """Matrix products of `rows` x `depth` with `depth` x `columns`, `number` in all: in sequence,
    or all in a single call (`is_grouped`)."""

    rows: float
    columns: float
    depth: float
    number: int = 1
    is_grouped: bool = False

    @classmethod
    def with_weights(
        cls, rows: float, weights: float, depth: float, number: int = 1, is_grouped: bool = False
    ) -> Product:
        """Return the product with a matrix of so many weights.

        Args:
            rows: tokens.
            weights: elements of the matrix.
            depth: its inputs.
            number: products, each with a matrix of its own.
            is_grouped: they are one call.
        """
        # Columns follow from the weights: a shard has as many inputs and fewer columns, or the
        # reverse.
        return cls(rows, weights / depth, depth, number, is_grouped)

    @property
    def flops(self) -> float:
        """Return the FLOPs of a single product."""
        return 2.0 * self.rows * self.columns * self.depth

    @property
    def inputs(self) -> float:
        """Return the elements of tokens read by a single product."""
        return self.rows * self.depth

    @property
    def outputs(self) -> float:
        """Return the elements written by a single product."""
        return self.rows * self.columns

    def num_bytes(self, element_bytes: float, output_bytes: float) -> float:
        """Return the bytes read and written by a single product.

        Args:
            element_bytes: of both factors.
            output_bytes: of what comes out.
        """
        # Both factors are read, the result is written.
        factors = self.inputs + self.columns * self.depth
        return factors * element_bytes + self.outputs * output_bytes


@dataclass(frozen=True)
class GemmEfficiency:
    """Constants of the products of a GPU type, relative to its sheet.

    `max_efficiency`: part of the peak at a TFLOP, traffic and fixed cost apart.
    `overhead_s`: fixed seconds of each product.
    `traffic`: fraction of the memory time (bytes / bandwidth of the sheet) that is added to the
    time of the FLOPs, which hides the rest.
    `decline`: the seconds of the FLOPs grow as their power 1 + `decline`.
    """

    max_efficiency: float
    overhead_s: float
    traffic: float = 0.0
    decline: float = 0.0


@dataclass(frozen=True)
class GroupedCall:
    """Constants of the grouped products of experts, of any GPU type.

    `traffic` as of `GemmEfficiency`; `call_s`: of each product, with its part of sorting tokens.
    """

    traffic: float
    call_s: float


NO_GROUPED = GroupedCall(1.0, 0.0)
"""Grouped products whose calls cost nothing."""


class ProductSpeed(NamedTuple):
    """Speed of a GPU's matrix products in a precision.

    `peak_flops_per_s` and `bytes_per_s` are of the sheet, `element_bytes` of an element of a
    factor, `output_bytes` of the result.
    """

    peak_flops_per_s: float
    bytes_per_s: float
    element_bytes: float
    curve: GemmEfficiency
    output_bytes: float = 2.0
    grouped: GroupedCall = NO_GROUPED

    @property
    def flops_per_s(self) -> float:
        """Return the rate of a product of one TFLOP, traffic and fixed cost apart."""
        return self.peak_flops_per_s * self.curve.max_efficiency

    def seconds(self, product: Product) -> float:
        """Time a product, `number` times.

        Grouped ones run at the rate of one large product, but none of their traffic hides.

        >>> speed = ProductSpeed(1e15, 1e12, 2, GemmEfficiency(0.5, 1e-5, traffic=1.0))
        >>> round(speed.seconds(Product(4096, 4096, 4096)), 6)  # 275 + 101 + 10 us
        0.000386
        """
        peak, bytes_per_s, element_bytes, curve, output_bytes, _ = self
        rows, columns, depth, calls, is_grouped = product
        # `Product.flops` and `Product.num_bytes`, in line: a search prices very many of them.
        flops = 2.0 * rows * columns * depth
        moved = (rows + columns) * depth * element_bytes + rows * columns * output_bytes
        fixed_s, traffic = curve.overhead_s, curve.traffic
        if is_grouped:
            flops, moved, calls = flops * calls, moved * calls, 1
            fixed_s, traffic = self.grouped.call_s, self.grouped.traffic
        # The clock is no higher than that of the sheet.
        efficiency, slowdown = curve.max_efficiency, 1.0
        # Long products run slower than a TFLOP's rate, short ones faster, up to the sheet's clock.
        if curve.decline:
            slowdown = max((flops / _TERA) ** curve.decline, min(1.0, efficiency))
        once_s = flops * slowdown / (peak * efficiency) + traffic * moved / bytes_per_s + fixed_s
        return calls * once_s
