"""A plan that fits, however slow: what is sought where nothing else has fitted.

Strategies look where plans are fast, and may leave out the only arrangement that holds a model: all
GPUs in one pipeline, with the least memory that the plan's own choices leave.  This looks there
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.seeds.more_room import MoreRoom
from megatron_hetero.planner.seeds.settings import (
    Settings,
    chosen_settings,
    keep_written,
    under_settings,
)
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.strategy import Strategy

QUICK_WORK = 2000
"""Stages priced by a search for any plan at all."""


class FirstFit:
    """A search under the settings with the least memory, in one replica and then in any number."""

    name = "first-fit"

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        least = least_settings(board.problem)
        found = self._found(board, with_least_settings(board.problem))
        if found is None:
            return
        training = board.problem.workload.training
        # With the job's own settings nothing has to be rewritten.
        if least == (training.micro_batch_size, training.recompute):
            board.score(found.placement, self.name)
        else:
            keep_written(board, found, least, self.name)

    def _found(self, board: Scoreboard, problem: Problem) -> Candidate | None:
        """Return the result of the first search that finds a plan."""
        for narrowed, strategy in self._ways(problem):
            part = Scoreboard(narrowed)
            strategy.search(part)
            # Where grids do not fit, moves may still find room.
            MoreRoom(QUICK_WORK).search(part)
            board.num_priced += part.num_priced
            if part.nearest is not None:
                return part.nearest
        return None

    def _ways(self, problem: Problem) -> Iterator[tuple[Problem, Strategy]]:
        constructive = Constructive(max_work=QUICK_WORK)
        # One replica has the most memory for each layer.
        if problem.cluster.limits.num_replicas is None:
            yield _with_one_replica(problem), constructive
        yield problem, constructive
        yield problem, Symmetric(max_work=QUICK_WORK)


def with_least_settings(problem: Problem) -> Problem:
    """Return the problem as if `least_settings` were the job's."""
    return under_settings(problem, least_settings(problem))


def least_settings(problem: Problem) -> Settings:
    """Return the settings with the least memory, among the settings that plans may choose."""
    return chosen_settings(problem, "full")


def _with_one_replica(problem: Problem) -> Problem:
    cluster = problem.cluster
    cluster = replace(cluster, limits=replace(cluster.limits, num_replicas=1))
    costs = problem.make_costs(cluster, problem.workload, problem.costs.profile)
    return replace(problem, costs=costs)
