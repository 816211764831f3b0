from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.evaluate import scoreboard
from megatron_hetero.planner.evaluate.canonical import canonical
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.structure_search import StructureSearch
from megatron_hetero.planner.units import chains_of
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload


@pytest.fixture(autouse=True)
def _as_in_large_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoreboard, "MAX_GPUS_PRICED_WHOLE", 0)


def _neighbours(problem: Problem, placement: Placement) -> Iterator[Placement]:
    """Yield the placements one move away, each filled anew."""
    own_flags, structure = OwnFlags(problem), tuple(chains_of(placement))
    for chains in neighbours(problem, structure, Completer(problem).shape):
        filled = [own_flags.nearest(chain, len(chains))[1] for chain in chains]
        placed = own_flags.placement(chains, filled)
        if placed is not None:
            yield placed


def test_only_what_is_slower_than_all_kept_is_not_priced_whole() -> None:
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4))
    problem = make_problem(cluster, make_workload(12, 1024))
    board = Scoreboard(problem)
    for strategy in (Constructive(), StructureSearch()):
        strategy.search(board)
    num_beaten = 0
    for start in board.ranking[-4:]:
        for placement in _neighbours(problem, start.placement):
            found = board.score(placement, "test")
            whole = board.score(placement, "test", whole=True)
            if found is None and whole is not None:
                num_beaten += 1
                assert whole.step_time_s > board.ranking[-1].step_time_s
                assert whole.placement == canonical(placement, problem.gpus)[0]
            else:
                assert found == whole
    assert num_beaten > 0


def test_the_best_of_stock_megatron_is_known_however_slow() -> None:
    problem = make_problem(make_cluster(("a", FAST, 5), ("b", SLOW, 3)), make_workload(12, 1024))
    other, board = Scoreboard(problem), Scoreboard(problem)
    for strategy in (Constructive(), StructureSearch()):
        strategy.search(other)
    plug_in = [candidate for candidate in other.ranking if candidate.rank_order is None]
    for start in plug_in[:16]:
        for placement in (start.placement, *_neighbours(problem, start.placement)):
            if canonical(placement, problem.gpus)[1] is None:
                board.score(placement, "test")
    assert len(board.ranking) == 64 and board.best_stock is None
    one = Placement((PlacedReplica((PlacedStage((Device("b", 0),), 12),), 4),))
    slow = board.score(one, "test")
    assert slow is not None and slow.step_time_s > board.ranking[-1].step_time_s
    assert board.best_stock is slow
