"""Planning again: with more never worse, near means little moved, limits hold in every way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.portfolio import STRATEGIES
from megatron_hetero.planner.replan.replanning import Replanning, replan
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.stock import is_stock
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload, place
from tests.planner.strategies import clusters, workloads

FOUR = make_cluster(("a", FAST, 2), ("b", SLOW, 1), ("c", SLOW, 1), sites=["w", "w", "e"])
FOUR = replace(
    FOUR,
    nodes=tuple(replace(n, gpu_price_per_hour=1.0 + (n.name == "a")) for n in FOUR.nodes),
)
SMALL = make_workload(num_layers=4, global_batch_size=4, tied_embeddings=False)
THREE = make_cluster(("a", FAST, 2), ("b", SLOW, 2), ("c", SLOW, 2))
WORKLOAD = make_workload(num_layers=10, global_batch_size=12)


def without_node(cluster: Cluster, name: str) -> Cluster:
    nodes = tuple(node for node in cluster.nodes if node.name != name)
    links = {pair: link for pair, link in cluster.node_links.items() if name not in pair}
    return replace(cluster, nodes=nodes, node_links=links)


def check(found: Replanning, cluster: Cluster) -> None:
    """Valid, priced as it says, in order: each moves more than the one before and is faster."""
    for way in found.ways:
        validate_plan(way.plan, cluster)
        assert way.plan.estimates is not None
        assert way.step_time_s == pytest.approx(way.plan.estimates.step_time_s)
        fresh = estimate_plan(way.plan, cluster)
        assert fresh.step_time_s == pytest.approx(way.step_time_s)
        assert set(way.plan.idle_reasons) == set(way.plan.idle_devices)
    for before, way in zip(found.ways, found.ways[1:], strict=False):
        assert way.step_time_s < before.step_time_s
        if before.movement.time_s is not None and way.movement.time_s is not None:
            assert before.movement.time_s <= way.movement.time_s
            steps = way.pays_after_steps
            assert steps is not None
            more_s = way.movement.time_s - before.movement.time_s
            saved_s = before.step_time_s - way.step_time_s
            assert (steps - 1) * saved_s < more_s <= steps * saved_s * (1 + 1e-9)


@st.composite
def grown(draw: st.DrawFn, cluster: Cluster) -> Cluster:
    """The same with more bandwidth everywhere, or with a node more."""
    if draw(st.booleans()):
        faster = {
            pair: replace(link, bytes_per_s=2 * link.bytes_per_s)
            for pair, link in cluster.node_links.items()
        }
        return replace(cluster, node_links=faster)
    like = draw(st.sampled_from(cluster.nodes))
    node = Node("new", like.gpu_type, draw(st.integers(1, 2)), "main", "new", like.link)
    links = dict(cluster.node_links)
    link = max(links.values(), key=lambda k: k.bytes_per_s, default=like.link)
    for other in cluster.nodes:
        links[other.name, "new"] = links["new", other.name] = link
    return replace(cluster, nodes=(*cluster.nodes, node), node_links=links)


@settings(max_examples=12, deadline=None)
@given(st.data(), clusters(max_gpus=4), workloads(max_layers=5, max_micro_batches=4))
def test_with_more_nothing_is_worse_and_staying_moves_nothing(
    data: st.DataObject, cluster: Cluster, workload: Workload
) -> None:
    try:
        old = plan_cluster(cluster, workload)
    except InfeasiblePlanError:
        return
    assert old.estimates is not None
    more = data.draw(grown(cluster))
    found = replan(old, more)
    check(found, more)
    stay = found.ways[0]
    assert stay.movement.moved_bytes == 0 and stay.movement.time_s == 0
    assert stay.step_time_s <= old.estimates.step_time_s * (1 + 1e-9)
    best = plan_cluster(more, workload, bounded=False).estimates
    assert best is not None
    assert found.ways[-1].step_time_s <= best.step_time_s * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(st.data(), clusters(max_gpus=5), workloads(max_layers=5, max_micro_batches=4))
def test_after_a_loss_every_way_is_a_plan(
    data: st.DataObject, cluster: Cluster, workload: Workload
) -> None:
    assume(len(cluster.nodes) > 1)
    less = without_node(cluster, data.draw(st.sampled_from(cluster.nodes)).name)
    try:
        old = plan_cluster(cluster, workload, bounded=False)
        best = plan_cluster(less, workload, bounded=False)
    except InfeasiblePlanError:
        return
    found = replan(old, less, store_bytes_per_s=1e9)
    check(found, less)
    assert best.estimates is not None
    assert found.ways[-1].step_time_s <= best.estimates.step_time_s * (1 + 1e-9)
    # Least movement is least time: nodes fetch beside each other.
    times_s = [way.movement.time_s for way in found.ways]
    assert None not in times_s and times_s[0] == min(t for t in times_s if t is not None)


def two_replicas() -> tuple[Cluster, Plan]:
    cluster = make_cluster(("a", FAST, 2), ("b", FAST, 2))
    return cluster, place("tp2:4 @96 | tp2:4 @96", make_workload(global_batch_size=192), cluster)


def test_a_lost_replica_is_left_away_without_moving_anything() -> None:
    cluster, old = two_replicas()
    found = replan(old, without_node(cluster, "b"))
    assert found.ways[0].layout == "tp2:4 @192" and found.ways[0].movement.moved_bytes == 0
    assert found.ways[0].plan.replicas[0].stages[0].devices == ("a:0", "a:1")


def test_a_spare_takes_the_place_of_what_was_lost() -> None:
    _, old = two_replicas()
    spare = make_cluster(("a", FAST, 2), ("spare", FAST, 2))
    ways = replan(old, spare).ways
    layouts = [way.layout for way in ways]
    assert layouts[0] == "tp2:4 @192"  # nothing moves
    kept = next(w for w in ways if len(w.plan.replicas) > 1)
    assert {d.split(":")[0] for d in kept.plan.replicas[0].stages[0].devices} == {"a"}
    assert kept.movement.lost_bytes == 0 and kept.movement.time_s is not None


def test_what_is_kept_lies_where_it_was() -> None:
    """Replicas that the search numbers otherwise are put back; stock plans stay stock plans."""
    cluster = make_cluster(*((name, FAST, 2) for name in "abcd"))
    workload = make_workload(num_layers=8, global_batch_size=16)
    old = plan_cluster(cluster, workload)
    found = replan(old, cluster)
    assert len(found.ways) == 1 and found.ways[0].movement.moved_bytes == 0
    stock = plan_cluster(cluster, workload, objective=Objective(stock_only=True))
    less = without_node(cluster, "a")
    for way in replan(stock, less, objective=Objective(stock_only=True)).ways:
        assert is_stock(way.plan)
        validate_plan(way.plan, less)


def test_steps_that_are_left_decide() -> None:
    old = plan_of_three()
    less = without_node(THREE, "c")

    def chosen(num_steps: float) -> float:
        found = replan(old, less, store_bytes_per_s=1e6, objective=Objective(num_steps=num_steps))
        check(found, less)
        return found.ways[found.chosen].movement.time_s or 0.0

    assert chosen(1) <= chosen(1e9)
    ways = replan(old, less, store_bytes_per_s=1e6)
    assert ways.chosen == len(ways.ways) - 1
    assert replan(old, less, store_bytes_per_s=1e6, prefer="near").chosen == 0


def test_equal_questions_get_equal_answers() -> None:
    old = plan_of_three()
    less = without_node(THREE, "b")
    shuffled = replace(less, nodes=less.nodes[::-1])
    one, other = (replan(old, c).ways for c in (less, shuffled))
    assert [plan_to_data(w.plan) for w in one] == [plan_to_data(w.plan) for w in other]


LIMITS = {
    "width": Limits(max_tensor_parallel=1),
    "depth": Limits(max_pipeline_parallel=2),
    "replicas": Limits(num_replicas=2),
    "idle": Limits(idle_devices=("a:0", "c")),
    "ends": Limits(first_stage_nodes=("b",), last_stage_nodes=("a", "b")),
    "no width on a": Limits(no_tensor_parallel_across=("nodes", "a")),
    "sites": Limits(no_data_parallel_across_sites=True),
    "price": Limits(max_price_per_hour=5.0),
    "reserve": Limits(memory_reserve_bytes=39 << 30),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_hold_in_every_strategy_and_when_planning_again(name: str) -> None:
    limits_hold(name, sorted(STRATEGIES.keys() - {"thorough"}))


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_limits_hold_in_the_thorough_search(name: str) -> None:
    limits_hold(name, ["thorough"])


@cache
def plan_of_four() -> Plan:
    return plan_cluster(FOUR, SMALL)


@cache
def plan_of_three() -> Plan:
    return plan_cluster(THREE, WORKLOAD)


def limits_hold(name: str, strategies: list[str]) -> None:
    limits = LIMITS[name]
    if name != "reserve":
        limits = replace(limits, memory_reserve_bytes=0)
    limited = replace(FOUR, limits=limits)
    num_planned = 0
    for strategy in strategies:
        try:
            plan = plan_cluster(limited, SMALL, strategy=strategy, bounded=False)
        except InfeasiblePlanError:
            continue
        validate_plan(plan, limited)
        num_planned += 1
    assert num_planned >= min(4, len(strategies))
    for way in replan(plan_of_four(), limited).ways:
        validate_plan(way.plan, limited)


def test_what_cannot_be_planned_again_is_refused() -> None:
    old = plan_of_three()
    with pytest.raises(UsageError, match="another model"):
        replan(old, THREE, make_workload(num_layers=11, global_batch_size=12))
    with pytest.raises(UsageError, match="does not say which model"):
        replan(replace(old, workload=None), THREE)
    late = Objective(num_steps=1000.0, deadline_s=1e-3)
    with pytest.raises(InfeasiblePlanError, match="keeps --deadline"):
        replan(old, THREE, objective=late)
