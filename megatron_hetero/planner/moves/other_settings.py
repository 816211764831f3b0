"""The search for shapes again, under settings that the job's own flags do not have.

The strategies before price every stage with the job's micro-batch size and recompute.  A shape that
lacks memory with these, or that is slow with them, may be the best one with others, and is not
found then: under HexiScale's setting 3, flags without recompute had led to steps that were half as
long again.  So shapes are also sought as if other settings were the job's, and the best of them
taken over as they are, and filled with each stage's own (`refine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from megatron_hetero.cost.choices import micro_batch_sizes, recomputes
from megatron_hetero.cost.placement import Placement, Recompute
from megatron_hetero.model.spec import TrainingSpec
from megatron_hetero.planner.evaluate.candidate import Candidate, has_the_jobs_settings
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.local import unlike, unlike_and_calm
from megatron_hetero.planner.moves.refine import Refine
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.strategy import Strategy

Settings = tuple[int, Recompute]
"""Micro-batch size and recompute."""

_SIZES = 1, 2, 4
"""Micro-batch sizes; of many GPUs up to two that are not the job's own are tried."""
_MAX_GPUS = 64, 32
"""Up to which the first and the second are: in larger clusters they take long and found nothing."""
_FEW_GPUS = 8
"""Up to which other settings are always tried: it takes a few seconds."""
_NEAR = 1.02
"""Shapes that lack memory count if they promise steps no longer than this, beside the best."""


class OtherSettings:
    """Runs strategies on boards of their own, and refines the best shapes of these; see the
    module."""

    name = "other-settings"

    def __init__(
        self, strategies: Callable[[int], Sequence[Strategy]], num_starts: int = 8
    ) -> None:
        self.strategies = strategies
        """By number of GPUs."""
        self.num_starts = num_starts
        """Shapes of each setting: that fit, and half as many that lack memory."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        if board.is_exact or not settings_matter(board):
            return
        problem = board.problem
        parts = {settings: self._part(board, *settings) for settings in other_settings(problem)}
        smallest, (least, most) = _SIZES[0], _extremes(problem)
        first, further = parts.get((smallest, least)), (smallest, most)
        if first is not None and lacks_memory(first) and further not in {*parts, _own(problem)}:
            parts[further] = self._part(board, *further)
        starts: list[Candidate] = []
        for part in parts.values():
            starts += unlike_and_calm(part.ranking_with_counts, self.num_starts)
            starts += unlike(part.misses.fastest, self.num_starts // 2)
        Refine(num_polished=self.num_starts).refine(board, starts)

    def _part(self, board: Scoreboard, size: int, recompute: Recompute) -> Scoreboard:
        """A board on which shapes have been sought under settings; the best are taken over."""
        costs = board.problem.costs.variant(micro_batch_size=size, recompute=recompute)
        part = Scoreboard(replace(board.problem, costs=costs))
        for strategy in self.strategies(board.problem.num_gpus):
            before = part.num_priced
            strategy.search(part)
            board.num_priced += part.num_priced - before
            board.say_progress()
        if board.problem.num_gpus <= _MAX_GPUS[0]:  # else one layer is little: `refine` is as good
            for found in unlike_and_calm(part.ranking_with_counts, self.num_starts):
                self._take_over(board, found, size, recompute)
        return part

    def _take_over(
        self, board: Scoreboard, found: Candidate, size: int, recompute: Recompute
    ) -> None:
        """Keep what fits under other settings as it is: `refine` fills it anew, which may be worse
        where a climb under these settings had divided layers and micro-batches well."""
        costs = board.problem.costs
        placement = with_settings(found.placement, costs.workload.training, size, recompute)
        board.keep_refined(placement, costs.placement(placement), self.name, found.rank_order)


def with_settings(
    placement: Placement, training: TrainingSpec, size: int, recompute: Recompute
) -> Placement:
    """A placement found as if `size` and `recompute` were the job's, for the job as it is."""
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


def settings_matter(board: Scoreboard) -> bool:
    """Whether the best plan has settings unlike the job's, or others would be about as fast if they
    had the memory."""
    best = board.nearest
    if best is None or board.problem.num_gpus <= _FEW_GPUS:
        return True
    return lacks_memory(board) or not has_the_jobs_settings(best.placement)


def lacks_memory(board: Scoreboard) -> bool:
    """Whether shapes that lack memory promise steps about as short as the best, or shorter."""
    promise_s = min((miss.step_time_s for miss in board.misses.fastest), default=inf)
    best = board.nearest
    return best is None or promise_s < _NEAR * best.step_time_s


def other_settings(problem: Problem) -> list[Settings]:
    """Of few GPUs all sizes with both extremes of recompute.  Else the job's micro-batch size with
    the other extreme; larger sizes with all recomputed, so that few shapes lack memory; smaller
    ones, which need less, with nothing."""
    (own, recompute), (least, most) = _own(problem), _extremes(problem)
    found: list[Settings] = [(own, least if recompute == most else most)]
    others = [size for size in _SIZES if size in micro_batch_sizes(problem.costs) and size != own]
    if problem.num_gpus <= _FEW_GPUS:
        found += product(others, (least, most))
    for size, max_gpus in zip(others, _MAX_GPUS, strict=False):
        if problem.num_gpus <= max_gpus:
            found.append((size, most if size > own else least))
    return [settings for settings in dict.fromkeys(found) if settings != _own(problem)]


def _own(problem: Problem) -> Settings:
    training = problem.workload.training
    return training.micro_batch_size, training.recompute


def _extremes(problem: Problem) -> tuple[Recompute, Recompute]:
    """Least and most recompute that stages may have."""
    kinds, (_, own) = recomputes(problem.costs), _own(problem)
    return ("none" if "none" in kinds else own), ("full" if "full" in kinds else own)
