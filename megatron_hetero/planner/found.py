"""The best that a search has found, or the error that says why there is nothing."""

from __future__ import annotations

from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.planner.advise.alternatives import shortage_of
from megatron_hetero.planner.advise.nothing_fits.infeasible import infeasible_error
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objectives.outcome import limits_error
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.seeds.first_fit import FirstFit
from megatron_hetero.planner.structure_search import StructureSearch
from megatron_hetero.units import format_bytes


def best_or_error(problem: Problem, board: Scoreboard) -> Candidate:
    """Return the best candidate of a board, with queues on shared paths.

    Raises:
        InfeasiblePlanError: nothing fits, or nothing keeps the limits of time and money.
    """
    try:
        # Candidates are compared again with queues on shared paths.
        best = Rescorer(board).best()
    except KeyboardInterrupt:
        best, board.interrupted = board.best, True
    if best is None and board.nearest is None and not board.interrupted:
        FirstFit().search(board)
        # What holds the model is seldom fast: the search goes on from it.
        if board.ranking_of_all:
            StructureSearch().search(board)
        best = Rescorer(board).best()
    if best is None:
        raise infeasible_or_limits(problem, board)
    if not best.keeps_limits:  # queues on shared paths made it too slow
        raise limits_error(problem, best)
    return best


def infeasible_or_limits(problem: Problem, board: Scoreboard) -> InfeasiblePlanError:
    """Return the error to raise where a board has no best plan."""
    if board.nearest is not None:
        return limits_error(problem, board.nearest)
    return infeasible_error(problem, board)


def stock_or_error(problem: Problem, board: Scoreboard) -> Candidate:
    """Return the best candidate that stock Megatron runs.

    Raises:
        InfeasiblePlanError: stock Megatron has no plan, or none that fits or keeps the limits.
    """
    stock = Rescorer(board).best_stock()
    if stock is not None:
        return stock
    if board.nearest_stock is not None:
        raise limits_error(problem, board.nearest_stock, "plan of stock Megatron")
    if not problem.nodes:
        raise infeasible_error(problem, board)
    miss = board.out_of_memory.nearest_stock
    if miss is None:
        raise InfeasiblePlanError(
            "Stock Megatron has no plan at all under the limits and numbers of this job: equal "
            "replicas of one tensor-parallel width must divide its micro-batches "
            f"({problem.num_micro_batches}). Leave --stock away, or change the job or the limits"
        )
    short = shortage_of(problem, miss)
    raise InfeasiblePlanError(
        f"No plan of stock Megatron fits: the nearest, {short.layout}, lacks "
        f"{format_bytes(short.missing_bytes)} on {', '.join(short.devices)} ({short.gpu_type}), "
        f"with {format_bytes(short.reserve_bytes)} in reserve. Leave --stock away for a plan of "
        "the plug-in, or make the job smaller"
    )
