"""The search over structures: what it completes and tunes is priced the same by the cost model."""

from __future__ import annotations

from hypothesis import given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.loop import Descent, SearchLimits
from megatron_hetero.planner.objective import Standing
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.structure_search import StructureSearch
from megatron_hetero.planner.units import chains_of
from tests.planner.strategies import cases, clusters, workloads

ANYTHING = clusters(max_gpus=5)


@settings(max_examples=cases(25), deadline=None)
@given(cluster=ANYTHING, workload=workloads(6, 8))
def test_tuned_pipelines_fit_and_last_as_long_as_the_cost_model_says(
    cluster: Cluster, workload: Workload
) -> None:
    problem = make_problem(cluster, workload)
    completer = Completer(problem)
    for start in search(problem, strategies=[Symmetric()]).ranking[:3]:
        structure = tuple(chains_of(start.placement))
        for given_only in (False, True):
            found = completer.complete(structure, completer.own_size, given_only)
            if found is None:
                continue
            before = problem.costs.placement(found.placement(completer.own_size))
            tuned = completer.tune(found, 20_000)
            cost = problem.costs.placement(tuned.placement(completer.own_size))
            assert cost.missing_bytes <= 0
            slowest_s = max(replica.pipeline_s for replica in cost.replicas)
            assert abs(slowest_s - tuned.quick_s) <= 1e-9 * slowest_s
            assert slowest_s <= max(r.pipeline_s for r in before.replicas) * (1 + 1e-9)


@settings(max_examples=cases(10), deadline=None)
@given(cluster=ANYTHING, workload=workloads(6, 8))
def test_it_improves_on_its_starts_and_finds_the_same_again(
    cluster: Cluster, workload: Workload
) -> None:
    problem = make_problem(cluster, workload)
    boards = []
    for _ in range(2):
        board = Scoreboard(problem)
        Symmetric().search(board)
        before = board.best
        StructureSearch(SearchLimits(max_work=10_000)).search(board)
        if before is not None:
            assert board.best is not None
            assert board.best.key <= before.key
        boards.append([(c.placement, c.step_time_s) for c in board.ranking_of_all])
    assert boards[0] == boards[1]


def test_descents_are_compared_by_the_best_that_they_came_to_or_that_waits() -> None:
    found = Completion((), (), (), 0.0, is_given=False)

    def node(time_s: float) -> Climber:
        return Climber((Standing(), time_s), 0, found, None)

    nothing, slow = Descent([]), Descent([node(5.0)], best=node(4.0))
    waits, ended = Descent([node(2.0)]), Descent([node(9.0)], best=node(3.0))
    assert sorted([nothing, slow, ended, waits], key=Descent.reached) == [
        waits,
        ended,
        slow,
        nothing,
    ]
