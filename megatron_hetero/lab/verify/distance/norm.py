"""Distance of a gradient norm from the one process's, whose own sum is rounded.

Stock Megatron adds up the squares of every gradient in fp32. On a CPU one process was off by 2.7e-6
of the norm so (17.360775 for 17.360821), and a plan, whose ranks add up shorter parts, by less. A
norm between the printed one and the exact one of the same gradients is therefore no distance.
"""

from __future__ import annotations

import numpy

from megatron_hetero.lab.verify.processes.record import RankRecord

MOST_ROUNDING = 1e-5
"""Most of a norm that rounding of its sum explains. A norm that is further off was not made of the
recorded gradients, and counts as it is printed."""


def norm_span(reference: RankRecord, step: int) -> tuple[float, float]:
    """Return the lower and the upper of two norms: the printed one, and that of the recorded
    gradients in fp64."""
    printed = float.fromhex(reference.norms[step])
    gradients = (reference.arrays[f"gradient/{step}/{name}"] for name in reference.shards)
    squares = (numpy.square(gradient, dtype=numpy.float64).sum() for gradient in gradients)
    exact = float(numpy.sqrt(sum(squares)))
    if not abs(exact - printed) <= MOST_ROUNDING * printed:
        return printed, printed
    return min(printed, exact), max(printed, exact)


def norm_distance(norm: float, span: tuple[float, float]) -> float:
    """Return how far a norm is outside of a span, relative to it; NaN for a NaN."""
    low, high = span
    # Inside, the span's nearest number is the norm itself; a NaN stays one.
    nearest = norm if low <= norm <= high else low if norm < low else high
    return abs(norm - nearest) / nearest if nearest else abs(norm - nearest)
