"""Plans with sharded layers, sought behind a search with whole ones: never slower than without.

Structures on the board and grids of equal replicas are completed anew, with as many sharded layers
as make each fastest, and the search over structures goes on from the best of them (`beside`).
"""

from __future__ import annotations

from itertools import islice

from megatron_hetero.planner.beside import MAX_GRIDS, Beside
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.loop import SearchLimits
from megatron_hetero.planner.seeds.first_fit import FirstFit
from megatron_hetero.planner.seeds.symmetric import grids
from megatron_hetero.planner.structure_search import StructureSearch
from megatron_hetero.planner.units import keep_step


class ShardedSearch:
    """Does nothing where plans may not have sharded layers."""

    name = "sharded"

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem = board.problem
        may_shard = problem.objective.shards_layers and not problem.objective.stock_only
        training, model = problem.workload.training, problem.workload.model
        if not (may_shard and training.use_distributed_optimizer and not model.num_experts):
            return
        # Where nothing fits with whole layers, anything quick serves as a start.
        if board.nearest is None:
            for strategy in (FirstFit(), StructureSearch(SearchLimits(moves=False))):
                strategy.search(board)
        search = Beside(board, shards=True)
        starts = islice(grids(problem), MAX_GRIDS), search.of_board()
        best = search.best(filter(keep_step, structures) for structures in starts)
        if best is not None:
            board.keep_refined(best.placement, best.cost, self.name, best.rank_order)
