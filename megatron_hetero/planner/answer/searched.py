"""The candidate asked for: the best of a search that can run."""

from __future__ import annotations

from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.planner.advise.simplest import simplest
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.hanging import hanging
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Progress, Scoreboard
from megatron_hetero.planner.exchange_groups import with_groups
from megatron_hetero.planner.found import best_or_error, stock_or_error
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock_strategy import STOCK

_MAX_REFUSED = 32
"""Plans after which the search gives up, if none of them can run."""


def searched(
    problem: Problem, progress: Progress | None, strategy: str, simplest_within: float | None
) -> tuple[Scoreboard, Candidate, Candidate]:
    """Return the board, the board's best candidate, and the candidate asked for."""
    board = search(problem, progress, strategies_of("auto" if strategy == STOCK else strategy))
    while True:
        # Take the best, or fail with the reason.
        first = _first(problem, board)
        # Another candidate than the fastest: the simplest near it, or with exchange groups.
        best = first
        if simplest_within is not None and not board.interrupted:
            best = simplest(board, first, simplest_within)
        elif not (board.interrupted or board.is_exact):
            best = with_groups(problem, board, first)
        # The operations of all ranks have to end under NCCL's rules, or the next best is taken.
        refused = hanging(problem, best)
        if refused is None:
            return board, first, best
        Rescorer(board).refuse(refused)
        if len(board.refused) == _MAX_REFUSED:
            raise _none_runs(board)


def _first(problem: Problem, board: Scoreboard) -> Candidate:
    """Return the best candidate of the board that no proof has refused."""
    try:
        is_stock = problem.objective.stock_only
        return stock_or_error(problem, board) if is_stock else best_or_error(problem, board)
    except InfeasiblePlanError as error:
        if not board.refused:
            raise
        raise _none_runs(board) from error


def _none_runs(board: Scoreboard) -> InfeasiblePlanError:
    """Return the error to raise where the proof of operations refused all plans it was asked of."""
    fastest = board.refused[0]
    deepest = max(len(replica.stages) for replica in fastest.candidate.placement.replicas)
    return InfeasiblePlanError(
        f"{fastest.why}\nNo job could run the fastest plan, whose pipelines have up to {deepest} "
        f"stages, nor the next {len(board.refused) - 1}. Plan shorter ones: `limits: "
        f"{{max_pipeline_parallel: {max(deepest * 3 // 4, 1)}}}` in the cluster file"
    )
