"""Plans with experts dealt out over replicas, sought behind a search without: never slower.

Structures on the board, grids of equal replicas, and pools of equal replicas on each type of GPUs
are completed anew, every stage with the way to deal experts out that is fastest for it, and the
search over structures goes on from the best of them.  It has boards of its own, one for each
dispatcher of tokens that the job leaves open, so that what the search found before stays as it is;
only its best joins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice, product
from math import inf

from megatron_hetero.cost.choices import deals_experts, dispatchers
from megatron_hetero.model.spec import TokenDispatcher
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import Standing
from megatron_hetero.planner.problem import Chain, Structure, Unit, chains_of, equal_units
from megatron_hetero.planner.seeds.symmetric import grids
from megatron_hetero.planner.structure_search import PART, Loop, StructureSearch

_MAX_GRIDS = 64
_POOLS = 3
"""Pools of each type that are combined with those of the others."""


class DealtSearch:
    """Does nothing where plans may not deal experts out, or speed is not all that counts."""

    name = "dealt"

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem = board.problem
        objective = problem.objective
        # Limits of money and stock plans have no deals over replicas.
        is_by_speed = not (objective.stock_only or objective.may_want_fewer(problem.cluster))
        if not (is_by_speed and problem.costs.has_launch_counts and deals_experts(problem.costs)):
            return
        for dispatcher in dispatchers(problem.costs):
            best = _DealtLoop(board, dispatcher).found()
            if best is not None:
                board.keep_refined(best.placement, best.cost, self.name, best.rank_order)
                board.is_exact = False  # no enumeration has such plans


class _DealtLoop(Loop):
    """The search over structures that deal experts out, from those of another board."""

    def __init__(self, whole: Scoreboard, dispatcher: TokenDispatcher) -> None:
        board = Scoreboard(whole.problem)
        board.with_queues = whole.with_queues
        super().__init__(board, StructureSearch(), dealt_by=dispatcher)
        self.own_work //= len(dispatchers(whole.problem.costs))
        self.whole = whole
        self.best_s = self.known_s

    @property
    def known_s(self) -> float:
        """The shortest step so far."""
        best = self.whole.nearest
        return inf if best is None else best.step_time_s

    def found(self) -> Candidate | None:
        """Search, and return the best with queues on shared paths; None where nothing fits."""
        self.go_on_from(self.structures(), self.options.slack)
        self.whole.num_priced += self.board.num_priced
        return Rescorer(self.board).best()

    def estimated(self, found: Completion) -> Climber:
        """Return the first rung; the exchange of experts that are dealt out is another than the
        one that `Tails` estimates."""
        self.num += 1
        return Climber((Standing(), found.quick_s), self.num, found, None)

    def structures(self) -> Iterator[Structure]:
        """Yield structures, each once, while some of the work is left."""
        known: set[Hashable] = set()
        on_board = (*self.whole.ranking_of_all, *self.whole.out_of_memory.fastest)
        of_board = (tuple(chains_of(one.placement)) for one in on_board)
        # Pools first: they use all GPUs, and each type by itself.
        for structures in (self.pools(), islice(grids(self.problem), _MAX_GRIDS), of_board):
            for structure in structures:
                # Half of the part of the work that these structures may take.
                if self.done > self.own_work // PART // 2:
                    return
                if (key := self.image(structure)) not in known:
                    known.add(key)
                    yield structure

    def pools(self) -> Iterator[Structure]:
        """Yield equal replicas on all GPUs of each type, the types beside each other: the best few
        of each type, by what they would take for the whole batch."""
        types = sorted({node.gpu_type.name for node in self.problem.nodes})
        # [type] -> its best pools.
        best: list[list[Structure]] = []
        for name in types:
            ranked: list[tuple[float, int, Structure]] = []
            for structure in self._pools_of(name):
                if self.done > self.own_work // PART // 4:
                    break
                if (found := self.sized(structure)) is not None:
                    ranked.append((found.quick_s, len(ranked), structure))
            best.append([structure for _, _, structure in sorted(ranked)[:_POOLS]])
        for pools in product(*best):
            yield tuple(chain for pool in pools for chain in pool)

    def _pools_of(self, name: str) -> Iterator[Structure]:
        """Yield every grid on all GPUs of one type, replicas beside each other."""
        problem = self.problem
        nodes = [node for node in problem.nodes if node.gpu_type.name == name]
        for width in sorted({w for node in nodes for w in problem.widths[node.name]}):
            units = [unit for node in nodes for unit in equal_units(problem, node, width)]
            for depth in range(1, min(len(units), problem.max_stages()) + 1):
                # One replica alone has nobody to deal experts out with.
                replicas, rest = divmod(len(units), depth)
                if rest or replicas < 2:
                    continue
                # Replicas along the nodes, and across them.
                yield _along(units, depth)
                if depth > 1:
                    yield tuple(tuple(units[r::replicas]) for r in range(replicas))


def _along(units: list[Unit], depth: int) -> tuple[Chain, ...]:
    return tuple(tuple(units[i : i + depth]) for i in range(0, len(units), depth))
