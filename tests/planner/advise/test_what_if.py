"""What to add first: figures are those of real plans, and no addition makes a plan worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron_hetero.cluster.node_links import Link, NodeLinks
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.advise.additions import additions
from megatron_hetero.planner.advise.what_if import what_to_add
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.strategies import clusters, workloads

CLUSTER = make_cluster(("a", FAST, 2), ("b", SLOW, 2), sites=["west", "east"])
WORKLOAD = make_workload(num_layers=8, global_batch_size=8)


def test_each_type_and_each_class_of_links_is_added_once() -> None:
    found = {g.what.split(" (")[0]: g for g in additions(make_problem(CLUSTER, WORKLOAD))}
    assert sorted(found) == [
        f"links inside {FAST.name} nodes 2 times as fast",
        f"links inside {SLOW.name} nodes 2 times as fast",
        "one more machine like a",
        "one more machine like b",
        "the network between east and west 2 times as fast",
    ]
    more = found["one more machine like a"].cluster
    assert [n.num_gpus for n in more.nodes] == [2, 2, 2]
    faster = found["the network between east and west 2 times as fast"].cluster
    own, new = CLUSTER.node_links["a", "b"], faster.node_links["a", "b"]
    assert new == replace(own, bytes_per_s=2 * own.bytes_per_s)


def test_only_the_links_of_the_class_become_faster() -> None:
    sites = {"a": "west", "b": "west", "c": "east"}
    slow, fast = Link(1e9, 1e-3), Link(5e9, 1e-5)
    classes = {("west", "west"): fast, ("west", "east"): slow, ("east", "west"): slow}
    links = NodeLinks(sites, classes, {("a", "b"): slow, ("b", "a"): slow})
    nodes = make_cluster(("a", FAST, 1), ("b", FAST, 1), ("c", SLOW, 1)).nodes
    nodes = tuple(replace(n, site=sites[n.name]) for n in nodes)
    cluster = replace(CLUSTER, nodes=nodes, node_links=links)
    inside = next(
        g for g in additions(make_problem(cluster, WORKLOAD)) if "network inside west" in g.what
    ).cluster.node_links
    assert inside["a", "b"].bytes_per_s == 2e9 and inside["b", "a"].bytes_per_s == 2e9
    assert inside["a", "c"] == slow and inside["c", "a"] == slow


def test_figures_are_of_plans_made_with_the_addition() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 1), sites=["west", "east"])
    workload = make_workload(num_layers=5, global_batch_size=4)
    plan = plan_cluster(cluster, workload, bounded=False)
    assert plan.estimates is not None
    what = what_to_add(plan, cluster, num_planned=2)
    assert not what.is_planned_anew and what.step_time_s == plan.estimates.step_time_s
    found = what.additions
    planned = [w for w in found if w.step_time_s is not None]
    assert len(planned) == 2 and len(found) == 3
    assert planned[0].what.startswith("one more machine like a")
    grown = {g.what: g.cluster for g in additions(make_problem(cluster, workload))}
    for w in planned:
        estimates = plan_cluster(grown[w.what], workload, bounded=False).estimates
        assert estimates is not None and w.gain is not None
        assert w.step_time_s == pytest.approx(
            min(estimates.step_time_s, plan.estimates.step_time_s)
        )
        assert w.gain == pytest.approx(1 - w.step_time_s / plan.estimates.step_time_s)
    times = [w.step_time_s for w in planned]
    assert times == sorted(times)


def test_additions_are_not_credited_with_what_planning_again_brings() -> None:
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
    best, poor = (plan_cluster(c, WORKLOAD) for c in (cluster, make_cluster(("b", SLOW, 2))))
    assert best.estimates is not None and poor.estimates is not None
    assert poor.estimates.step_time_s > 1.5 * best.estimates.step_time_s
    of_best, of_poor = (what_to_add(plan, cluster, num_planned=2) for plan in (best, poor))
    assert (of_best.is_planned_anew, of_poor.is_planned_anew) == (False, True)
    assert of_poor.step_time_s == pytest.approx(best.estimates.step_time_s)
    for one, other in zip(of_best.additions, of_poor.additions, strict=True):
        assert one.what == other.what and one.gain == pytest.approx(other.gain)


def test_an_hour_of_a_plan_pays_for_traffic_too() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 1), sites=["west", "east"])
    nodes = tuple(replace(node, price_per_hour=1.0) for node in cluster.nodes)
    prices = {("west", "east"): 1e-3, ("east", "west"): 1e-3}
    cluster = replace(cluster, nodes=nodes, prices_per_gb=prices)
    workload = make_workload(num_layers=5, global_batch_size=4)
    plan = plan_cluster(cluster, workload, bounded=False)
    found = what_to_add(plan, cluster, num_planned=1).additions[0]
    grown = {g.what: g.cluster for g in additions(make_problem(cluster, workload))}[found.what]
    estimates = plan_cluster(grown, workload, bounded=False).estimates
    assert estimates is not None and estimates.traffic_price_per_hour
    assert estimates.price_per_hour is not None
    hour = estimates.price_per_hour + estimates.traffic_price_per_hour
    assert found.price_per_hour == pytest.approx(hour)


@settings(max_examples=8, deadline=None)
@given(clusters(max_gpus=4), workloads(max_layers=5, max_micro_batches=4))
def test_no_addition_makes_a_plan_worse(cluster: Cluster, workload: Workload) -> None:
    try:
        plan = plan_cluster(cluster, workload, bounded=False)
    except InfeasiblePlanError:
        return
    assert plan.estimates is not None
    for w in what_to_add(plan, cluster, num_planned=2).additions:
        assert w.promised_step_s <= plan.estimates.step_time_s * (1 + 1e-12)
        if w.step_time_s is not None and w.gain is not None:
            assert w.step_time_s <= plan.estimates.step_time_s * (1 + 1e-12)
            assert 0 <= w.gain + 1e-12 < 1
