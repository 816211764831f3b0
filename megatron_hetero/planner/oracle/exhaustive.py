"""Every placement of a small problem: the optimum, by the cost model."""

from __future__ import annotations

from math import inf

from megatron_hetero.planner.evaluate.candidate import ranked_time_s
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.oracle.prune import wanted_placements

_MAX_WORK = 100_000
"""As `wanted_placements` counts it: a second or two."""
_MAX_GPUS = 6
"""GPUs up to which structures are enumerated; more GPUs have too many structures."""


class Exhaustive:
    """Prices every unit, replica, stage order, layer count and micro-batch count, up to symmetry,
    except placements ruled out by the board.

    Declines (scores nothing) where that is more than `max_work`.
    """

    name = "exhaustive"

    def __init__(self, max_work: int = _MAX_WORK, max_gpus: int = _MAX_GPUS) -> None:
        self.max_work = max_work
        self.max_gpus = max_gpus

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem = board.problem
        if problem.num_gpus > self.max_gpus:
            return
        for placement in wanted_placements(problem, limit_s(board), self.max_work) or ():
            board.score(placement, self.name)


def limit_s(board: Scoreboard) -> float:
    """Return the step time from which on plans need not be priced where nothing but speed
    counts."""
    if not board.problem.objective.is_fastest_step or board.best is None or not board.ranking:
        return inf
    best, first = board.best, board.ranking[0]
    # The best of 1F1B's own launch counts is kept as well.
    return max(ranked_time_s(best.placement, best.cost), first.step_time_s)
