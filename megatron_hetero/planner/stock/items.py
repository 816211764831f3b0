"""Things of which the search of stock Megatron's best knows a bound, each part of the one before: a
form of groups, a form on a grid, a grid with its links, a case, divisions of a case."""

from __future__ import annotations

import numpy as np

from megatron_hetero.hashed import value
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.divisions import Divisions
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks
from megatron_hetero.planner.stock.rates import GroupForm


@value(frozen=True)
class FormItem:
    """A form on some ranks, with a way to deal experts out."""

    ranks: StockRanks
    form: GroupForm


@value(frozen=True)
class LaidItem:
    """A form on a grid, with each of these numbers of chunks."""

    grid: StockGrid
    form: GroupForm
    chunks: tuple[int, ...]
    fits: bool = False
    """The bound has the memory of its GPUs in it."""


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


Item = tuple[StockRanks, GroupForm] | FormItem | LaidItem | GridItem | StockCase | ReadyItem
"""Ranks with a form without dealing are the first."""
