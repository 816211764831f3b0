"""Searches under settings that are not the job's, and what they find, written for the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_hetero.cost.choices import micro_batch_sizes, recomputes
from megatron_hetero.cost.placement import Placement, Recompute
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem

Settings = tuple[int, Recompute]
"""Micro-batch size and recompute."""


def chosen_settings(problem: Problem, wanted: Recompute) -> Settings:
    """Return the smallest micro-batch size, and the wanted recompute, as far as plans may choose
    them; the job's own else.  Where both are free, they do not depend on the job's flags."""
    recompute = problem.workload.training.recompute
    free = wanted in recomputes(problem.costs)
    return min(micro_batch_sizes(problem.costs)), wanted if free else recompute


def under_settings(problem: Problem, settings: Settings) -> Problem:
    """Return the problem as if the settings were the job's."""
    size, recompute = settings
    return replace(problem, costs=problem.costs.variant(micro_batch_size=size, recompute=recompute))


def search_under(
    board: Scoreboard, settings: Settings, name: str, search: Callable[[Scoreboard], None]
) -> None:
    """Search under the settings, and keep what is found on the board, written for the job.

    Args:
        name: of the strategy.
        search: fills a board.
    """
    training = board.problem.workload.training
    if settings == (training.micro_batch_size, training.recompute):
        search(board)
        return
    part = Scoreboard(under_settings(board.problem, settings))
    # Interrupted, what was found so far stays.
    try:
        search(part)
    finally:
        board.num_priced += part.num_priced
        for candidate in (*part.ranking_of_all, *part.out_of_memory.fastest):
            keep_written(board, candidate, settings, name)


def keep_written(board: Scoreboard, found: Candidate, settings: Settings, name: str) -> None:
    """Price a candidate found under the settings as a placement of the job, and keep it."""
    placement = with_settings(found.placement, board.problem.workload.training, *settings)
    cost = board.whole_cost(placement)
    board.keep_refined(placement, cost, name, found.rank_order)
    if cost.missing_bytes > 0:
        board.out_of_memory.keep(board.candidate(placement, cost, name))


def with_settings(
    placement: Placement, training: TrainingSpec, size: int, recompute: Recompute
) -> Placement:
    """Return a placement found under the given settings as a placement of the job with its own
    settings.

    Args:
        training: the job's own settings, which the placement does not repeat.
        size: micro-batch size of every replica, in sequences.
        recompute: of every stage.
    """
    own_size = None if size == training.micro_batch_size else size
    own_recompute = None if recompute == training.recompute else recompute
    return Placement(
        tuple(
            replace(
                replica,
                micro_batch_size=own_size,
                stages=tuple(replace(stage, recompute=own_recompute) for stage in replica.stages),
            )
            for replica in placement.replicas
        )
    )
