"""Queues on paths that replicas share: prices and the event simulation agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.simulator.shared_paths import queued, sharing_replicas
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock
from tests.cost import builders
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload, place

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SLOW_LINK = Link(4e7, 2e-3)
CLUSTER = make_cluster(("a", FAST, 2), ("b", SLOW, 2), between=SLOW_LINK)
WORKLOAD = make_workload(8, 512, 16, seq_length=1024)
CROSSING = "tp1:5,tp1:3 @8 | tp1:5,tp1:3 @8"


def crossing_plan(layout: str = CROSSING) -> Plan:
    """Two replicas whose second stages are on the other node."""
    return on_devices(place(layout, WORKLOAD, CLUSTER), [["a:0", "b:0"], ["a:1", "b:1"]])


def on_devices(plan: Plan, names: Sequence[Sequence[str]]) -> Plan:
    """Each stage on a GPU of its own."""
    replicas = [
        replace(
            r, stages=tuple(replace(s, devices=(n,)) for s, n in zip(r.stages, of, strict=True))
        )
        for r, of in zip(plan.replicas, names, strict=True)
    ]
    return replace(plan, replicas=tuple(replicas))


def test_pipelines_that_share_a_path_take_as_long_as_simulated() -> None:
    plan = crossing_plan()
    predicted = estimate_plan(plan, CLUSTER)
    simulated = simulate_plan(plan, CLUSTER)
    alone = builders.estimate_plan(plan, CLUSTER)
    assert max(predicted.replica_times_s) == pytest.approx(simulated.pipelines_s)
    assert predicted.step_time_s == pytest.approx(simulated.step_time_s, rel=1e-3)
    assert predicted.step_time_s > 1.05 * alone.step_time_s


def test_paths_of_ones_own_have_no_queues() -> None:
    plan = place("tp2:5,tp2:3 @16", WORKLOAD, CLUSTER)
    placement = placement_of(plan, CLUSTER)
    costs = CostModel(CLUSTER, WORKLOAD)
    cost = costs.placement(placement)
    assert sharing_replicas(CLUSTER, placement) == ()
    assert queued(costs, placement, cost) is cost
    assert sharing_replicas(CLUSTER, placement_of(crossing_plan(), CLUSTER)) == (0, 1)


def test_a_replica_that_returns_shares_the_path_with_itself() -> None:
    plan = place("tp1:2,tp1:2,tp1:4 @16", WORKLOAD, CLUSTER)
    stages = plan.replicas[0].stages
    there_and_back = tuple(
        replace(s, devices=(n,)) for s, n in zip(stages, ("a:0", "b:0", "a:1"), strict=True)
    )
    plan = replace(plan, replicas=(replace(plan.replicas[0], stages=there_and_back),))
    assert sharing_replicas(CLUSTER, placement_of(plan, CLUSTER)) == (0,)
    assert is_stock(plan)  # which waits for its sends
    predicted = estimate_plan(plan, CLUSTER)
    simulated = simulate_plan(plan, CLUSTER, is_stock=True)
    assert predicted.step_time_s == pytest.approx(simulated.step_time_s, rel=1e-3)


def test_the_search_ends_with_the_best_by_simulation() -> None:
    problem = make_problem(CLUSTER, WORKLOAD)
    board = search(problem)
    best = Rescorer(board).best()
    assert best is not None
    for candidate in board.ranking_of_all:
        cost = queued(problem.costs, candidate.placement, candidate.cost)
        other = board.candidate(candidate.placement, cost, "")
        assert best.step_time_s <= other.step_time_s / 0.995 * (1 + 1e-9)


def test_what_is_predicted_of_two_sites_is_what_is_simulated() -> None:
    cluster = load_cluster(EXAMPLES / "two-sites" / "cluster.yaml")
    workload = load_workload(EXAMPLES / "two-sites" / "gpt-2.7b.flags")
    problem = make_problem(cluster, workload)
    best = Rescorer(search(problem, strategies=strategies_of("columns"))).best()
    assert best is not None and len(best.placement.replicas) > 1
    simulated_s = simulate_plan(bare_plan(problem, best, {}), problem.cluster).step_time_s
    assert best.step_time_s == pytest.approx(simulated_s, rel=0.01)


def test_messages_of_passes_do_not_wait_for_gradients_on_their_way() -> None:
    """Later stages exchange theirs while earlier ones still work."""
    nodes = ("a", FAST, 3), ("b", FAST, 3)
    cluster = make_cluster(*nodes, between=Link(4e8, 1e-4))
    plan = place("tp1:3,tp1:3,tp1:2 @8 | tp1:3,tp1:2,tp1:3 @8", WORKLOAD, cluster)
    plan = on_devices(plan, [["a:0", "b:0", "a:1"], ["b:1", "a:2", "b:2"]])
    simulated = simulate_plan(plan, cluster)
    first = min(begin_s for _, begin_s, _ in simulated.collectives)
    assert first < simulated.pipelines_s
    assert max(estimate_plan(plan, cluster).replica_times_s) == pytest.approx(simulated.pipelines_s)
