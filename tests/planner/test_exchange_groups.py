"""Groups of machines for the exchange of gradients: where sites are far, and kept off by limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.diff import diff_plans
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.planner import exchange_groups, plan_and_explain
from megatron_hetero.planner.evaluate.rescore import distinct
from megatron_hetero.planner.exchange_groups import groups_of, shortest_pipelines
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.report.text.explanation import exchange_lines
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import reasons_not_stock
from tests.cost.builders import FAST, SLOW, make_workload

SIX = Limits(num_replicas=6)
NEAR, FAR = Link(12.5e9, 1e-5), Link(1.25e8, 2e-2)


def two_sites(limits: Limits = SIX) -> Cluster:
    """Two sites of three machines of one GPU each, 1 Gb/s between them."""
    nodes = tuple(
        Node(f"{site}{i}", gpu, 1, site, f"{site}{i}", Link(1e11, 0.0))
        for site, gpu in (("north", FAST), ("south", SLOW))
        for i in range(3)
    )
    links = {
        (a.name, b.name): NEAR if a.site == b.site else FAR
        for a in nodes
        for b in nodes
        if a is not b
    }
    return Cluster(nodes, links, limits)


def small_job(**changes: object) -> Workload:
    return make_workload(4, global_batch_size=48, **changes)


@pytest.fixture(scope="module")
def planned() -> tuple[object, object]:
    return plan_and_explain(two_sites(), small_job())


def test_sites_are_groups_where_the_way_between_them_is_long(planned, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plan, explanation = planned
    assert len(plan.replicas) > 2
    assert {frozenset(group) for group in plan.exchange_groups} == {
        frozenset(f"{site}{i}" for i in range(3)) for site in ("north", "south")
    }
    alike = replace(plan, replicas=tuple(replace(r, num_micro_batches=1) for r in plan.replicas))
    assert reasons_not_stock(alike) == ("gradients exchanged by groups of machines",)
    choice = explanation.exchange
    assert choice is not None and choice.is_used and choice.gain > 0.02
    assert choice.num_crossing == choice.num_sets > 0
    assert plan.estimates is not None
    assert plan.estimates.bound_s is not None
    assert plan.estimates.bound_s <= plan.estimates.step_time_s
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert estimate_plan(plan, two_sites()) == plan.estimates
    simulated = simulate_plan(plan, two_sites())
    assert simulated.step_time_s == pytest.approx(plan.estimates.step_time_s, rel=0.02)
    (text, _) = exchange_lines(explanation)
    assert "north0 + north1 + north2 | south0" in str(text)


def test_without_groups_the_same_plan_is_slower(planned) -> None:  # type: ignore[no-untyped-def]
    plan, explanation = planned
    plain = replace(plan, exchange_groups=())
    found = estimate_plan(plain, two_sites())
    assert found.step_time_s == pytest.approx(explanation.exchange.other_step_time_s, rel=1e-3)
    assert any("exchange groups" in str(d) for d in diff_plans(plain, plan))


def test_limits_keep_one_exchange() -> None:
    plan, explanation = plan_and_explain(
        two_sites(replace(SIX, as_given=("exchange",))), small_job()
    )
    assert plan.exchange_groups == () and explanation.exchange is None


def test_near_sites_keep_what_stock_megatron_runs() -> None:
    near = two_sites()
    cluster = replace(
        near,
        nodes=tuple(replace(node, gpu_type=FAST) for node in near.nodes),
        node_links=dict.fromkeys(near.node_links, NEAR),
    )
    plan, explanation = plan_and_explain(cluster, small_job())
    assert plan.exchange_groups == ()
    choice = explanation.exchange
    assert choice is not None and not choice.is_used and choice.gain < 0.02
    (text, _) = exchange_lines(explanation)
    assert "one exchange among all holders; by sites the step takes" in str(text)


def test_groups_are_the_sites_and_regions_of_the_machines_in_use(planned) -> None:  # type: ignore[no-untyped-def]
    plan, _ = planned
    cluster = two_sites()
    assert [
        set(map(frozenset, groups)) for groups, _ in groups_of(cluster, placement_of(plan, cluster))
    ] == [{frozenset(g) for g in plan.exchange_groups}]


def unlike_cards(limits: Limits) -> Cluster:
    """Four machines of two GPUs with 100 Gb/s and four with 25, one replica on each GPU."""
    speeds = {f"fast{i}": 12.5e9 for i in range(4)} | {f"slow{i}": 3.125e9 for i in range(4)}
    nodes = tuple(
        Node(name, FAST, 2, "here", name, Link(1e11, 0.0), uplink_bytes_per_s=speed)
        for name, speed in speeds.items()
    )
    links = {
        (a, b): Link(min(speeds[a], speeds[b]), 1e-5) for a in speeds for b in speeds if a != b
    }
    return Cluster(nodes, links, limits)


def test_parts_follow_unlike_network_cards(tmp_path: Path) -> None:
    cluster, job = unlike_cards(Limits(num_replicas=16)), make_workload(4, global_batch_size=128)
    plan, explanation = plan_and_explain(cluster, job)
    assert {len(group) for group in plan.exchange_groups} == {1}
    uplink_of = dict(zip(plan.exchange_groups, plan.exchange_uplinks, strict=True))
    assert uplink_of == {
        (node.machine,): (4 if node.name.startswith("fast") else 1,) for node in cluster.nodes
    }
    choice = explanation.exchange
    assert choice is not None and choice.is_used and choice.uplinks == plan.exchange_uplinks
    print(f"parts by bandwidth save {choice.gain:.1%} of the step")
    even = estimate_plan(replace(plan, exchange_uplinks=()), cluster)
    plain = estimate_plan(replace(plan, exchange_groups=(), exchange_uplinks=()), cluster)
    assert plan.estimates is not None
    assert plan.estimates.step_time_s < even.step_time_s < plain.step_time_s
    assert plain.step_time_s == pytest.approx(choice.other_step_time_s, rel=1e-3)
    assert choice.gain > 0.3
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert estimate_plan(plan, cluster) == plan.estimates
    simulated = simulate_plan(plan, cluster)
    assert simulated.step_time_s == pytest.approx(plan.estimates.step_time_s, rel=1e-6)
    (text, _) = exchange_lines(explanation)
    assert "uplinks, which differ up to 4 times" in str(text)
    (changed,) = diff_plans(replace(plan, exchange_uplinks=()), plan)
    assert "exchange uplinks" in str(changed)


def test_equal_parts_stay_where_they_take_as_long() -> None:
    """The distributed optimizer gives the owners."""
    cluster = unlike_cards(Limits(num_replicas=16))
    job = make_workload(4, global_batch_size=128, use_distributed_optimizer=True)
    plan, _ = plan_and_explain(cluster, job)
    assert plan.exchange_uplinks == ()


def test_limits_keep_one_exchange_over_unlike_network_cards() -> None:
    limits = Limits(num_replicas=16, as_given=("exchange",))
    job = make_workload(4, global_batch_size=128)
    plan, explanation = plan_and_explain(unlike_cards(limits), job)
    assert plan.exchange_groups == plan.exchange_uplinks == () and explanation.exchange is None


def test_plans_of_many_replicas_keep_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_groups, "MAX_REPLICAS", 5)
    plan, explanation = plan_and_explain(two_sites(), small_job())
    assert plan.exchange_groups == () and explanation.exchange is None


def test_groups_are_tried_for_what_waits_least() -> None:
    """Queues that the search has simulated count, and so does what its ranking has no room for."""
    board = search(make_problem(two_sites(Limits()), small_job()))
    waiting, other, left_out = distinct(board.ranking_of_all)[:3]
    replicas = tuple(replace(r, pipeline_s=10 * r.pipeline_s) for r in waiting.cost.replicas)
    queued = replace(waiting, cost=replace(waiting.cost, replicas=replicas))
    kept: Any = SimpleNamespace(
        ranking_of_all=(waiting, other), simulated=((left_out, left_out), (queued, waiting))
    )
    *first, last = shortest_pipelines(kept)
    assert {one.placement for one in first} == {other.placement, left_out.placement}
    assert last.placement == waiting.placement
    assert last.cost == waiting.cost  # the queues are priced anew, with groups
