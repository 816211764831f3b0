from __future__ import annotations

from megatron_hetero.planner.canonical import canonical
from megatron_hetero.planner.constructive import Constructive
from megatron_hetero.planner.fill import Filler
from megatron_hetero.planner.local import LocalSearch, neighbours
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.scoreboard import Scoreboard
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload


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
