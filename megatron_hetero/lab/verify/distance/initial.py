"""Comparison of the initial weights with those that Megatron's own initialisation draws.

The numbers differ, for they are drawn from other states; their distribution may not. Each tensor is
held to the two-sample Kolmogorov-Smirnov test, and no two tensors may be copies of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy
from scipy.stats import ks_2samp

from megatron_hetero.lab.verify.processes.record import RankRecord

CHANCE = 1e-9
"""Probability below which a difference between two samples is no chance."""
_COMPARED = 256
"""Elements of two tensors whose correlation is computed; that of independent ones is about 0.06."""
_ALIKE = 0.5


def first_unlike_draw(reference: RankRecord) -> str | None:
    """Find the first tensor whose initial weights Megatron would not draw; None if there is none.

    Args:
        reference: the record of the one process, which has both draws.
    """
    drawn, stock = reference.drawn, reference.stock_drawn
    for name, due in stock.items():
        own = drawn[name]
        # A constant (norms, biases) has no distribution; it has to be the same.
        if due.min() == due.max():
            if not numpy.array_equal(own, due):
                return f"{name} does not start as Megatron's constant {due.flat[0]:g}"
        elif ks_2samp(own.ravel(), due.ravel(), method="asymp").pvalue < CHANCE:
            return (
                f"{name} has a standard deviation of {own.std():.3g}, and in Megatron's own "
                f"initialisation one of {due.std():.3g}"
            )
    # Tensors that Megatron itself draws alike do not count.
    for one, other in sorted(_alike(drawn) - _alike(stock)):
        return f"{one} and {other} start alike"
    return None


def _alike(drawn: Mapping[str, numpy.ndarray]) -> set[tuple[str, str]]:
    """Return the pairs of tensors that begin with the same numbers, up to a factor."""
    rows = {
        name: array.ravel()[:_COMPARED].astype(numpy.float64)
        for name, array in drawn.items()
        if array.size >= _COMPARED and array.ravel()[:_COMPARED].std() > 0
    }
    if not rows:
        return set()
    # Of the first elements, so that a scaled copy is found as well; [tensor, tensor].
    correlation = numpy.abs(numpy.corrcoef(numpy.stack(list(rows.values()))))
    names = list(rows)
    return {
        (names[i], names[j])
        for i, j in combinations(range(len(names)), 2)
        if correlation[i, j] > _ALIKE
    }
