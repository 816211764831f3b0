"""Things of which the search of stock Megatron's best knows a bound, each part of the one before: a
form of groups on some ranks, a form on a grid, a grid with its links, a case, divisions of a case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.hashed import value
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.divisions import Divisions
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks
from megatron_hetero.planner.stock.rates import GroupForm


@value(frozen=True)
class _InTurn:
    """Things of one kind, the lowest bound first.  There are hundreds of thousands, and most are
    never looked at: only the next one waits in the queue.

    Attributes:
        order: their positions, by bound.
        bounds_s: in this order.
        place: of the next one in it.
    """

    order: NDArray[np.int64]
    bounds_s: NDArray[np.float64]
    place: int

    @property
    def next(self) -> int:
        """The position of the next one."""
        return int(self.order[self.place])

    def following(self) -> Self:
        """Return the others."""
        return replace(self, place=self.place + 1)


@value(frozen=True)
class FormsItem(_InTurn):
    """Forms on some ranks, without dealing experts out."""

    ranks: StockRanks
    forms: Sequence[GroupForm]


@value(frozen=True)
class FormItem:
    """A form on some ranks, with a way to deal experts out."""

    ranks: StockRanks
    form: GroupForm


@value(frozen=True)
class GridsItem(_InTurn):
    """A form on several grids."""

    form: GroupForm
    grids: Sequence[StockGrid]


@value(frozen=True)
class GridItem:
    """A case of each of these numbers of chunks."""

    case: StockCase
    """The one of the fewest."""
    chunks: tuple[int, ...]


@value(frozen=True)
class ReadyItem:
    """Divisions of a case, the lowest bound first."""

    case: StockCase
    divisions: Divisions
    bounds_s: np.ndarray
    is_quick: bool
    """The bounds have the least exchange, not the case's own."""
    place: int = 0


Item = FormsItem | FormItem | GridsItem | GridItem | StockCase | ReadyItem


def in_order(
    bounds_s: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """Return what `_InTurn` has of things with such bounds."""
    order = np.argsort(bounds_s, kind="stable")
    return order, bounds_s[order], 0
