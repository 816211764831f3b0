"""Plans with experts dealt out over replicas, sought behind a search without: never slower.

Structures on the board, grids of equal replicas, and pools of equal replicas on each type of GPUs
are completed anew, every stage with the way to deal experts out that is fastest for it, and the
search over structures goes on from the best of them (`beside`), once for each dispatcher of tokens
that the job leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

from megatron_hetero.cost.choices import deals_experts, dispatchers
from megatron_hetero.model.training import TokenDispatcher
from megatron_hetero.planner.beside import MAX_GRIDS, Beside
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import equal_units
from megatron_hetero.planner.seeds.symmetric import grids
from megatron_hetero.planner.units import Structure, along_and_across

_POOLS = 3
"""Pools of each type that are combined with those of the others."""


class DealtSearch:
    """Does nothing where plans may not deal experts out, or speed is not all that counts."""

    name = "dealt"

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem = board.problem
        # Limits of money and stock plans have no deals over replicas.
        costs = problem.costs
        if not (problem.is_by_time and costs.has_launch_counts and deals_experts(costs)):
            return
        found = dispatchers(costs)
        for dispatcher in found:
            best = _Dealt(board, dispatcher, len(found)).best()
            if best is not None:
                board.keep_refined(best.placement, best.cost, self.name, best.rank_order)
                board.is_exact = False  # no enumeration has such plans


class _Dealt:
    """The search with one dispatcher of tokens, one of so many."""

    def __init__(self, whole: Scoreboard, dispatcher: TokenDispatcher, number: int) -> None:
        self.problem = whole.problem
        self.search = Beside(whole, dealt_by=dispatcher, part=1 / number)

    def best(self) -> Candidate | None:
        """Return the best with queues on shared paths; None where nothing fits."""
        # Pools first: they use all GPUs, and each type by itself.
        starts = self.pools(), islice(grids(self.problem), MAX_GRIDS), self.search.of_board()
        return self.search.best(starts)

    def pools(self) -> Iterator[Structure]:
        """Yield equal replicas on all GPUs of each type, the types beside each other: the best few
        of each type, by what they would take for the whole batch."""
        types = sorted({node.gpu_type.name for node in self.problem.nodes})
        # [type] -> its best pools.
        best: list[list[Structure]] = []
        for name in types:
            ranked: list[tuple[float, int, Structure]] = []
            for structure in self._pools_of(name):
                if not self.search.has_work(4):
                    break
                if (found := self.search.rungs.sized(structure)) is not None:
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
                yield from along_and_across(units, replicas)
