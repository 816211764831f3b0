"""Seeds that the job's own recompute hides: column generation under the other extreme of it.

`Columns` prices every stage with the job's recompute.  A structure that lacks memory may be the
best with more recompute, and a slow one the best with none.  So `Columns` runs again as if every
stage recomputed everything (or nothing, where the job says `full`); the search over structures then
gives every stage its own recompute.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from megatron_hetero.cost.choices import recomputes
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.planner.columns.settings import with_settings
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate.candidate import NEAR, NUM_TAKEN
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard


class OtherRecompute:
    """`Columns` as if all stages recomputed everything, or nothing where they do; see the module.

    It runs where the job's recompute stands in the way: where nothing fits, or where what lacks
    memory promises a step about as short as the best.
    """

    name = "columns"

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem, training = board.problem, board.problem.workload.training
        other: Recompute = "none" if training.recompute == "full" else "full"
        if other not in recomputes(problem.costs) or not _lacks_memory(board):
            return
        costs = problem.costs.variant(recompute=other)
        part = Scoreboard(replace(problem, costs=costs))
        Columns().search(part)
        board.num_priced += part.num_priced
        for found in part.ranking_with_counts[:NUM_TAKEN]:
            placement = with_settings(found.placement, training, training.micro_batch_size, other)
            cost = problem.costs.placement(placement)
            board.keep_refined(placement, cost, self.name, found.rank_order)


def _lacks_memory(board: Scoreboard) -> bool:
    """Return whether structures without memory promise steps about as short as the best."""
    best = board.nearest
    promise_s = min((miss.step_time_s for miss in board.out_of_memory.fastest), default=inf)
    return best is None or promise_s < NEAR * best.step_time_s
