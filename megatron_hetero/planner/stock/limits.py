"""Limits of the work of a search for stock Megatron's best plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_hetero.planner.stock.orders import MAX_ORDERS

FEW_DIVISIONS = 5_000
"""Divisions of a case that are priced where there are too many, those with the fastest slowest
stage."""


@dataclass(frozen=True)
class StockLimits:
    """Limits of work, after which the search ends with the best found."""

    num_orders: int = MAX_ORDERS
    """Orders of nodes and amounts, as `stock_ranks`."""
    num_grids: int = 200_000
    """Grids that are bounded."""
    num_cases: int = 50_000
    """Grids with bounded divisions; half as many of interleaved stages, whose schedules take longer
    to order."""
    num_made: int = 1_000_000
    """Grids bounded with links."""
    num_bounded: int = 2_000_000
    num_simulated: int = 2_000
    num_messages: int = 10**9
    """Messages of all steps that are simulated whole."""
    num_short_messages: int = 10**9
    """Messages of all short steps that stand for longer ones."""
    most_chunks: int = 4
    tolerance: float = 0.0
    """Part of the best step by which the result may be slower."""
    num_climbs: int = 50_000
    """Interleaved cases whose layers move between chunks as long as that lowers the bound."""
    climbs: bool = True
    """True if layers of the best, where it is interleaved, move as long as that shortens the
    simulated step."""
    few_divisions: int = FEW_DIVISIONS


BESIDE_A_PLAN = StockLimits(
    num_orders=100,
    num_grids=4_000,
    num_cases=64,
    num_made=2_400,
    num_bounded=60_000,
    num_simulated=8,
    num_messages=6_000,
    num_short_messages=24_000,
    tolerance=0.002,
    num_climbs=16,
    climbs=False,
    few_divisions=300,
)
"""About half a second on 8 GPUs, one or two on 64, one to five on a thousand."""
_FEW_GPUS = 8
_MANY_GPUS = 64


def limits_beside_a_plan(num_gpus: int) -> StockLimits:
    """Return the limits of a search for a plan to be compared with.

    Steps of few GPUs are simulated quickly, and divisions on few stages are few: for few GPUs more
    steps and more cases are looked at, which gives better plans.  On many each case takes long.
    """
    if num_gpus > _MANY_GPUS:
        return replace(BESIDE_A_PLAN, num_made=800, num_cases=32)
    if num_gpus > _FEW_GPUS:
        return BESIDE_A_PLAN
    return replace(BESIDE_A_PLAN, num_simulated=12, num_cases=128)
