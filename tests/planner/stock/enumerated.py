"""All grids of a small cluster, beside which tests hold the search of stock Megatron's best."""

from __future__ import annotations

from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockGrid, grids_of
from megatron_hetero.planner.stock.orders import MAX_ORDERS, stock_ranks


def stock_grids(
    problem: Problem, max_orders: int = MAX_ORDERS
) -> tuple[tuple[StockGrid, ...], bool]:
    """Return all grids without context parallelism, and whether the list is complete. Of grids that
    differ only in the names of like nodes the first is kept."""
    every, is_complete = stock_ranks(problem, max_orders)
    found: dict[tuple[object, ...], StockGrid] = {}
    for ranks in every:
        for grid in grids_of(problem, ranks, 1):
            found.setdefault(_content(grid), grid)
    return tuple(found.values()), is_complete


def _content(grid: StockGrid) -> tuple[object, ...]:
    """Return equal for grids with the same nodes at the same places; replicas may change theirs."""
    return grid.width, tuple(sorted(tuple(unit.node for unit in c) for c in grid.chains))
