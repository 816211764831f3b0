"""Plans beside the chosen one are priced as it is."""

from __future__ import annotations

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.planner.advise.alternatives import layout_text, runners_up
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_cluster, make_workload


def test_the_next_best_wait_for_shared_paths_like_the_plan_itself() -> None:
    cluster = make_cluster(
        ("a", FAST, 2), ("b", SLOW, 2), between=Link(0.4e9, 2e-5), limits=AS_GIVEN
    )
    problem = make_problem(cluster, make_workload(num_layers=12, global_batch_size=16))
    board = search(problem, None, strategies_of("constructive"))
    rescorer = Rescorer(board)
    best = rescorer.best()
    assert best is not None
    others = runners_up(problem, board, best, None)
    assert others
    queued, waits = {}, False
    for candidate in board.ranking_of_all:
        simulated = rescorer.with_queues(candidate)
        queued.setdefault(layout_text(candidate.placement), []).append(simulated.step_time_s)
        waits = waits or simulated.step_time_s > 1.001 * candidate.step_time_s
    assert waits, "some placement of the board waits for a path that its replicas share"
    for other in others:
        assert other.step_time_s in queued[other.layout]
        assert other.settings == ""
    assert [o.step_time_s for o in others] == sorted(o.step_time_s for o in others)


def test_what_is_too_large_to_simulate_says_so(monkeypatch) -> None:
    cluster = make_cluster(
        ("a", FAST, 2), ("b", SLOW, 2), between=Link(0.4e9, 2e-5), limits=AS_GIVEN
    )
    problem = make_problem(cluster, make_workload(num_layers=12, global_batch_size=16))
    board = search(problem, None, strategies_of("constructive"))
    assert board.best is not None
    monkeypatch.setattr(Rescorer, "may_simulate", lambda self, candidate: False)
    others = runners_up(problem, board, board.best, None)
    assert {o.settings for o in others} == {"priced without waiting for paths that replicas share"}
