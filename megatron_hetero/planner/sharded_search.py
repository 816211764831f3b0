"""Plans with sharded layers, sought behind a search with whole ones: never slower than without.

Structures on the board and grids of equal replicas are completed anew, with as many sharded layers
as make each fastest, and the search over structures goes on from the best of them.  It has a board
of its own, so that what the search with whole layers found stays as it is; only its best joins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice
from math import inf

from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Structure, chains_of, keep_step
from megatron_hetero.planner.seeds.first_fit import FirstFit
from megatron_hetero.planner.seeds.symmetric import grids
from megatron_hetero.planner.structure_search import PART, Loop, StructureSearch

_MAX_GRIDS = 64


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
            for strategy in (FirstFit(), StructureSearch(moves=False)):
                strategy.search(board)
        best = _ShardedLoop(board).found()
        if best is not None:
            board.keep_refined(best.placement, best.cost, self.name, best.rank_order)


class _ShardedLoop(Loop):
    """The search over structures with sharded layers, from those of another board."""

    def __init__(self, whole: Scoreboard) -> None:
        board = Scoreboard(whole.problem)
        board.with_queues = whole.with_queues
        super().__init__(board, StructureSearch(), shards=True)
        self.whole = whole
        self.best_s = self.known_s

    @property
    def known_s(self) -> float:
        """The shortest step with whole layers."""
        best = self.whole.nearest
        return inf if best is None else best.step_time_s

    def found(self) -> Candidate | None:
        """Search, and return the best with queues on shared paths; None where nothing fits."""
        self.go_on_from(self.structures(), self.options.slack)
        self.whole.num_priced += self.board.num_priced
        return Rescorer(self.board).best()

    def structures(self) -> Iterator[Structure]:
        """Yield structures whose replicas keep step, each once, while some of the work is left."""
        known: set[Hashable] = set()
        on_board = (*self.whole.ranking_of_all, *self.whole.out_of_memory.fastest)
        of_board = (tuple(chains_of(one.placement)) for one in on_board)
        for structures in (islice(grids(self.problem), _MAX_GRIDS), of_board):
            for structure in structures:
                if self.done > self.own_work // PART // 2:
                    return
                if keep_step(structure) and (key := self.image(structure)) not in known:
                    known.add(key)
                    yield structure
