from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.advise import capacity
from megatron_hetero.planner.advise.capacity import MoreGpus, may_fit
from megatron_hetero.planner.advise.nothing_fits.relaxations import with_more
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.oracle.exhaustive import Exhaustive
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from tests.cost.builders import FAST, GIB, make_cluster, make_workload
from tests.planner.strategies import clusters, workloads


@settings(max_examples=60, deadline=None)
@given(clusters(max_gpus=5), workloads(max_layers=8, max_micro_batches=4))
def test_whatever_fits_may_fit(cluster: Cluster, workload: Workload) -> None:
    problem = make_problem(cluster, workload)
    board = Scoreboard(problem)
    # One plan that fits is enough: those that are looked for first are found most quickly.
    for strategy in (Constructive(max_work=200), Exhaustive(30_000)):
        if board.best is None:
            strategy.search(board)
    if board.best is not None:
        assert may_fit(problem)
        # Each kind of GPU by itself bounds less tightly, never wrongly.
        limit, capacity._MAX_STATES = capacity._MAX_STATES, 0
        try:
            assert may_fit(problem)
        finally:
            capacity._MAX_STATES = limit


def test_the_bound_is_exact_on_nodes_of_one_gpu() -> None:
    small = replace(FAST, memory_bytes=1 * GIB)
    workload = make_workload(num_layers=40)
    for num_gpus in range(1, 6):
        nodes = [(f"n{i}", small, 1) for i in range(num_gpus)]
        problem = make_problem(make_cluster(*nodes), workload)
        assert may_fit(problem) == (search(problem).best is not None), num_gpus


def test_added_gpus_count_as_if_they_were_there() -> None:
    small = replace(FAST, memory_bytes=1 * GIB)
    workload = make_workload(num_layers=60)
    cluster = make_cluster(("a", small, 2))
    problem = make_problem(cluster, workload)
    more = [MoreGpus(cluster.nodes[0], num_gpus) for num_gpus in range(1, 8)]
    there = [may_fit(make_problem(with_more(cluster, m), workload)) for m in more]
    assert [may_fit(problem, m) for m in more] == there
    assert False in there
    assert True in there
    assert len(with_more(cluster, more[2]).nodes) == 3
    assert len(with_more(cluster, more[2]).devices) == 5
