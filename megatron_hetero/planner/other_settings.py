"""The search for shapes again, under settings that the job's own flags do not have.

The strategies before price every stage with the job's micro-batch size and recompute.  A shape that
lacks memory with these, or that is slow with them, may be the best one with others, and is not
found then: under HexiScale's setting 3, flags without recompute had led to steps that were half as
long again.  So shapes are also sought as if other settings were the job's, and the best of them
filled with each stage's own (`refine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from megatron_hetero.cost.choices import micro_batch_sizes, recomputes
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.planner.candidate import Candidate, has_the_jobs_settings
from megatron_hetero.planner.local import unlike, unlike_and_calm
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.refine import Refine
from megatron_hetero.planner.scoreboard import Scoreboard
from megatron_hetero.planner.strategy import Strategy

Settings = tuple[int, Recompute]
"""Micro-batch size and recompute."""

_SIZES = 1, 2, 4
"""Micro-batch sizes, of which two that are not the job's own are tried."""
_MAX_GPUS = 64, 32
"""Up to which the first and the second are: in larger clusters they take long and found nothing."""
_NEAR = 1.02
"""Shapes that lack memory count if they promise steps no longer than this, beside the best."""


class OtherSettings:
    """Runs strategies on boards of their own, and refines the best shapes of these; see the
    module."""

    name = "other-settings"

    def __init__(self, strategies: Callable[[], Sequence[Strategy]], num_starts: int = 8) -> None:
        self.strategies = strategies
        self.num_starts = num_starts
        """Shapes of each setting: that fit, and half as many that lack memory."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        if board.is_exact or not settings_matter(board):
            return
        starts: list[Candidate] = []
        for size, recompute in other_settings(board.problem):
            costs = board.problem.costs.variant(micro_batch_size=size, recompute=recompute)
            part = Scoreboard(replace(board.problem, costs=costs))
            for strategy in self.strategies():
                strategy.search(part)
            board.num_priced += part.num_priced
            starts += unlike_and_calm(part.ranking_with_counts, self.num_starts)
            starts += unlike(part.misses.fastest, self.num_starts // 2)
        Refine(num_polished=self.num_starts).refine(board, starts)


def settings_matter(board: Scoreboard) -> bool:
    """Whether the best plan has settings unlike the job's, or others would be about as fast if they
    had the memory."""
    ranking = board.ranking_of_all
    if not ranking:
        return True
    best = ranking[0]
    promise_s = min((miss.step_time_s for miss in board.misses.fastest), default=inf)
    may_fit = promise_s < _NEAR * best.step_time_s
    return may_fit or not has_the_jobs_settings(best.placement)


def other_settings(problem: Problem) -> list[Settings]:
    """The job's micro-batch size with the other extreme of recompute; larger sizes with all
    recomputed, so that few shapes lack memory; smaller ones, which need less, with nothing."""
    training = problem.workload.training
    own, kinds = training.micro_batch_size, recomputes(problem.costs)
    least: Recompute = "none" if "none" in kinds else training.recompute
    most: Recompute = "full" if "full" in kinds else training.recompute
    found: list[Settings] = [(own, least if training.recompute == most else most)]
    others = (size for size in _SIZES if size in micro_batch_sizes(problem.costs) and size != own)
    for size, max_gpus in zip(others, _MAX_GPUS, strict=False):
        if problem.num_gpus <= max_gpus:
            found.append((size, most if size > own else least))
    return [settings for settings in found if settings != (own, training.recompute)]
