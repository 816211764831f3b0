"""How much longer than a curve says calls of certain sizes last: ratios on a grid over the sizes.

A curve knows a call by its FLOPs and bytes.  Kernels also differ by the sizes themselves: tiles
that a matrix does not fill, few heads for many multiprocessors.  Ratios of measured to fitted
seconds are kept at nodes a factor of four apart in each size, and their logarithms interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, prod

from pydantic import BaseModel, ConfigDict

_STEP = 4.0
_MOST_KNOWN = 100_000


class SizeGrid(BaseModel):
    """Nodes at whole powers of four of each size of a call.

    `first`: the exponent of the lowest node of each size.  `counts`: nodes of each size, at least
    two.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    first: list[int]
    counts: list[int]

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of all sizes together."""
        return prod(self.counts)

    def around(self, sizes: Sequence[float]) -> list[tuple[int, float]]:
        """Return the nodes around a call and their weights, which add up to 1.

        Weights are linear in the logarithm of each size; a call beyond the grid takes the nearest
        edge.
        """
        found = [(0, 1.0)]
        for size, first, count in zip(sizes, self.first, self.counts, strict=True):
            # Nothing at all, too, is below the lowest node.
            place = log(max(size, _STEP**first)) / log(_STEP) - first
            place = min(max(place, 0.0), count - 1.0)
            low = min(int(place), count - 2)
            part = place - low
            # Every node so far is divided between its two neighbours along this size.
            found = [
                pair
                for node, weight in found
                for pair in (
                    (node * count + low, weight * (1.0 - part)),
                    (node * count + low + 1, weight * part),
                )
            ]
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
            logs = (self._logs[node] * weight for node, weight in self._grid.around(sizes))
            self._known[sizes] = exp(sum(logs))
        return self._known[sizes]
