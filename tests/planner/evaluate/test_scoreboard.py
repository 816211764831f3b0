from __future__ import annotations

import pytest

from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.completion.fill import Filler
from megatron_hetero.planner.evaluate import scoreboard
from megatron_hetero.planner.evaluate.canonical import canonical
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tools.referees.search.local import LocalSearch, neighbours
from tools.referees.search.unlike import unlike


@pytest.fixture(autouse=True)
def _as_in_large_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoreboard, "MAX_GPUS_PRICED_WHOLE", 0)


def test_only_what_is_slower_than_all_kept_is_not_priced_whole() -> None:
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4))
    problem = make_problem(cluster, make_workload(12, 1024))
    board = Scoreboard(problem)
    for strategy in (Constructive(), LocalSearch()):
        strategy.search(board)
    num_beaten = 0
    for start in board.ranking[-4:]:
        for placement in neighbours(problem, Filler(problem), start.placement):
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
    for strategy in (Constructive(), LocalSearch()):
        strategy.search(other)
    plug_in = [candidate for candidate in other.ranking if candidate.rank_order is None]
    for start in plug_in[:4]:
        for placement in (start.placement, *neighbours(problem, Filler(problem), start.placement)):
            if canonical(placement, problem.gpus)[1] is None:
                board.score(placement, "test")
    assert len(board.ranking) == 64 and board.best_stock is None
    one = Placement((PlacedReplica((PlacedStage((Device("b", 0),), 12),), 4),))
    slow = board.score(one, "test")
    assert slow is not None and slow.step_time_s > board.ranking[-1].step_time_s
    assert board.best_stock is slow


def test_like_nodes_exchanged_as_a_whole_are_one_start() -> None:
    cluster = make_cluster(("a", FAST, 2), ("b", FAST, 2), ("c", SLOW, 1))
    problem = make_problem(cluster, make_workload(num_layers=6, global_batch_size=8))
    ranking = search(problem, strategies=[Constructive()]).ranking
    images = [(c.step_time_s, c.contention, c.pattern) for c in ranking]
    assert len({c.structure for c in ranking}) > len(set(images))  # some are mirrored
    starts = unlike(ranking, 64)
    assert len({(c.step_time_s, c.contention, c.pattern) for c in starts}) == len(starts)
    assert len({c.structure for c in starts}) == len(starts)
    assert starts[0] is ranking[0]
