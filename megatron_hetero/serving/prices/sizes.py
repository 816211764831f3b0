"""How much longer than a curve says calls of certain sizes last: ratios on a grid over the sizes.

A curve knows a call by its FLOPs and bytes.  Kernels also differ by the sizes themselves: tiles
that a matrix does not fill, few heads for many multiprocessors.  Ratios of measured to fitted
seconds are kept at nodes a factor of four apart in each size, and their logarithms interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, prod

_PER_LOG = 1.0 / log(4.0)
_MOST_KNOWN = 100_000


@dataclass(frozen=True)
class SizeGrid:
    """Nodes at whole powers of four of each size of a call.

    Attributes:
        first: exponent of the lowest node of each size.
        counts: nodes of each size, at least two.
    """

    first: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of all sizes together."""
        return prod(self.counts)

    @cached_property
    def _axes(self) -> list[tuple[float, int, int]]:
        # The lowest size, its exponent and the number of nodes, of each size.
        pairs = zip(self.first, self.counts, strict=True)
        return [(4.0**first, first, count) for first, count in pairs]

    def around(self, sizes: Sequence[float]) -> list[tuple[int, float]]:
        """Return the nodes around a call and their weights, which add up to 1.

        Weights are linear in the logarithm of each size; a call beyond the grid takes the nearest
        edge.
        """
        found = [(0, 1.0)]
        for size, (lowest, first, count) in zip(sizes, self._axes, strict=True):
            # Nothing at all, too, is below the lowest node.
            place = log(size) * _PER_LOG - first if size > lowest else 0.0
            low = min(int(place), count - 2)
            part = min(place - low, 1.0)
            # Every node so far is divided between its two neighbours along this size.
            lower = [(node * count + low, weight * (1.0 - part)) for node, weight in found]
            found = lower + [(node * count + low + 1, weight * part) for node, weight in found]
        return found


class SizeRatios:
    """Measured over fitted seconds at the nodes of a grid.

    Args:
        grid: the nodes.
        logs: logarithm of the ratio at each node.
    """

    def __init__(self, grid: SizeGrid, logs: Sequence[float]) -> None:
        self._grid, self._logs = grid, logs
        self._known: dict[tuple[float, ...], float] = {}

    def at(self, sizes: tuple[float, ...]) -> float:
        """Return how many times as long as fitted a call of certain sizes lasts."""
        # A plan asks for the same matrices and numbers of tokens again and again.
        if sizes not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            logs = [self._logs[node] * weight for node, weight in self._grid.around(sizes)]
            self._known[sizes] = exp(sum(logs))
        return self._known[sizes]
