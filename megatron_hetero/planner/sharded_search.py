"""Plans with sharded layers, sought behind a search with whole ones: never slower than without.

Structures on the board and grids of equal replicas are completed anew, with as many sharded layers
as make each fastest, and the search over structures goes on from the best of them.  It has a board
of its own, so that what the search with whole layers found stays as it is; only its best joins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify
from itertools import islice

from megatron_hetero.planner.advise.nothing_fits.first_fit import FirstFit
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.refine import Refine
from megatron_hetero.planner.problem import Chain, chains_of, keep_step
from megatron_hetero.planner.shapes.symmetric import grids
from megatron_hetero.planner.structure_search import Loop, StructureSearch

_MAX_GRIDS = 64
_PART = 5
"""One part in so many of the work that structures have, where whole layers fit."""


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
        if board.nearest is None:
            for strategy in (FirstFit(), Refine()):
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
        if whole.nearest is not None:
            self.best_s = whole.nearest.step_time_s
            self.max_work //= _PART

    def found(self) -> Candidate | None:
        """Search, and return the best with queues on shared paths; None where nothing fits."""
        nodes = self.starts()
        heapify(nodes)
        self.descend(nodes, self.max_work)
        self.whole.num_priced += self.board.num_priced
        return Rescorer(self.board).best()

    def starts(self) -> list[Climber]:
        """Return the structures that promise most, estimated."""
        found: list[Climber] = []
        for key, structure in self.structures():
            if self.done > self.max_work // 2:
                break
            self.seen.add(key)
            completion = self.sized(structure)
            if completion is not None:
                found.append(self.estimated(completion))
        first = sorted(found)[: self.options.num_starts]
        return [node for node in first if node.time_s < self.options.slack * self.best_s]

    def structures(self) -> Iterator[tuple[Hashable, tuple[Chain, ...]]]:
        """Yield structures whose replicas keep step, each once."""
        known: set[Hashable] = set()
        on_board = (*self.whole.ranking_of_all, *self.whole.out_of_memory.fastest)
        plain = (one.placement for one in on_board if not one.placement.has_shares)
        of_board = (tuple(chains_of(placement)) for placement in plain)
        for structures in (islice(grids(self.problem), _MAX_GRIDS), of_board):
            for structure in structures:
                if keep_step(structure) and (key := self.image(structure)) not in known:
                    known.add(key)
                    yield key, structure
