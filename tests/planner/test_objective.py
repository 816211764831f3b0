"""Objectives and limits of time and money: exact on small clusters, never broken on any."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.price import price_of
from megatron_hetero.errors import InfeasiblePlanError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.objective import Objective, ObjectiveName
from megatron_hetero.planner.objectives.objective_bound import objective_bound
from megatron_hetero.planner.oracle.exact import Exact
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import all_placements
from tests.planner.strategies import clusters, workloads


@st.composite
def priced_clusters(draw: st.DrawFn, max_gpus: int) -> Cluster:
    """Random clusters whose machines have a price, whole or by the GPU."""
    cluster = draw(clusters(max_gpus))
    nodes = []
    for node in cluster.nodes:
        price = draw(st.sampled_from([0.5, 1.0, 3.0]))
        whole = draw(st.booleans())
        nodes.append(
            replace(
                node,
                price_per_hour=price * node.num_gpus if whole else None,
                gpu_price_per_hour=None if whole else price,
            )
        )
    return replace(cluster, nodes=tuple(nodes))


def brute_force(cluster: Cluster, workload: Workload) -> list[tuple[float, float, int]]:
    """Step time, money for a step and GPUs of every placement that fits."""
    costs = CostModel(cluster, workload)
    found = []
    for placement in all_placements(cluster, workload):
        cost = costs.placement(placement)
        if cost.missing_bytes <= 0:
            price = price_of(costs, placement, cost)
            assert price is not None
            spent = price.of_step(cost.step_time_s)
            found.append((cost.step_time_s, spent, len(list(placement.devices()))))
    return found


@settings(max_examples=20, deadline=None)
@given(
    priced_clusters(max_gpus=4),
    workloads(max_layers=3, max_micro_batches=2),
    st.sampled_from([None, 1.0, 1.3, 2.5]),
)
def test_small_clusters_are_planned_as_by_brute_force(
    cluster: Cluster, workload: Workload, slack: float | None
) -> None:
    """`auto` and `exact`, the cheapest and the fewest, with a deadline and without one."""
    plans = brute_force(cluster, workload)
    if not plans:
        return
    deadline_s = None if slack is None else slack * min(plans)[0] * (1 + 1e-12)
    in_time = [p for p in plans if deadline_s is None or p[0] <= deadline_s]
    for strategies in (None, [Exact()]):
        problem = make_problem(cluster, workload, objective=Objective("cheapest", 1, deadline_s))
        board = search(problem, strategies=strategies)
        assert board.best is not None
        # Plans with launch counts may be cheaper than any of 1F1B.
        least = min(p[1] for p in in_time)
        if board.best.has_counts:
            assert board.best.standing.value <= least * (1 + 1e-9)
        else:
            assert board.best.standing.value == pytest.approx(least)
        bound = objective_bound(problem)
        assert bound is not None and bound.value <= board.best.standing.value * (1 + 1e-9)
        if deadline_s is None:
            continue
        problem = make_problem(cluster, workload, objective=Objective("fewest-gpus", 1, deadline_s))
        board = search(problem, strategies=strategies)
        assert board.best is not None
        assert board.best.standing.value <= min(p[2] for p in in_time)
        assert board.best.has_counts or board.best.standing.value == min(p[2] for p in in_time)
        bound = objective_bound(problem)
        assert bound is not None and bound.value <= board.best.standing.value


@settings(max_examples=20, deadline=None)
@given(
    priced_clusters(max_gpus=4),
    workloads(max_layers=3, max_micro_batches=2),
    st.sampled_from([0.4, 1.0, 2.0, 6.0]),
)
def test_a_price_limit_is_kept_and_the_fastest_plan_under_it_found(
    cluster: Cluster, workload: Workload, limit: float
) -> None:
    plans = brute_force(cluster, workload)
    within = [step for step, spent, _ in plans if spent / step * 3600 <= limit * (1 + 1e-12)]
    limited = replace(cluster, limits=replace(cluster.limits, max_price_per_hour=limit))
    board = search(make_problem(limited, workload))
    if not within:
        assert board.best is None
        return
    assert board.best is not None
    assert board.best.step_time_s <= min(within) / (1 - 0.0051)
    bound = objective_bound(make_problem(limited, workload))
    assert bound is not None and bound.value <= board.best.step_time_s * (1 + 1e-9)


CLUSTER = make_cluster(("a", FAST, 1), ("b", SLOW, 2), ("c", SLOW, 1))
WORKLOAD = make_workload(num_layers=4, global_batch_size=4)


def priced(cluster: Cluster = CLUSTER, a: float = 6.0, b: float = 4.0, c: float = 4.0) -> Cluster:
    prices = {"a": a, "b": b, "c": c}
    nodes = tuple(replace(n, price_per_hour=prices[n.name]) for n in cluster.nodes)
    return replace(cluster, nodes=nodes)


def test_every_strategy_keeps_a_price_limit_and_a_deadline() -> None:
    """The fastest plan costs 6 an hour or more, and the cheapest takes longer than the deadline."""
    limits = Limits(memory_reserve_bytes=0, max_price_per_hour=5.0)
    cluster = replace(priced(c=1.0), limits=limits)
    for strategy in ("auto", "columns", "constructive", "hexiscale", "symmetric", "symmetric-even"):
        plan = plan_cluster(cluster, WORKLOAD, strategy=strategy, bounded=False)
        assert plan.estimates is not None and plan.estimates.price_per_hour is not None
        assert plan.estimates.price_per_hour <= 5.0, strategy
        step_s = plan.estimates.step_time_s
        in_time = Objective("cheapest", 100.0, 100.0 * 1.2 * step_s)
        _, explanation = plan_and_explain(cluster, WORKLOAD, strategy=strategy, objective=in_time)
        outcome = explanation.outcome
        assert outcome is not None and outcome.run_hours is not None
        assert outcome.run_hours <= 100.0 * 1.2 * step_s / 3600, strategy
        assert outcome.bound is not None and outcome.bound <= outcome.value


def test_an_outcome_counts_the_whole_run() -> None:
    objective = Objective("cheapest", num_steps=1000)
    plan, explanation = plan_and_explain(priced(), WORKLOAD, objective=objective)
    outcome, estimates = explanation.outcome, plan.estimates
    assert outcome is not None and estimates is not None
    assert estimates.price_per_hour is not None
    tokens = 4 * WORKLOAD.model.seq_length
    assert outcome.num_tokens == 1000 * tokens
    assert outcome.run_hours == pytest.approx(estimates.step_time_s / 3.6)
    hours = estimates.step_time_s / 3.6
    assert outcome.run_price == pytest.approx(estimates.price_per_hour * hours)
    assert outcome.value == pytest.approx(estimates.price_per_million_tokens)
    faster = plan_cluster(priced(), WORKLOAD).estimates
    assert faster is not None and faster.price_per_million_tokens is not None
    assert faster.step_time_s < estimates.step_time_s
    assert faster.price_per_million_tokens > outcome.value


def test_what_cannot_be_kept_names_the_nearest_that_can() -> None:
    cluster = priced(make_cluster(("a", FAST, 1), ("b", SLOW, 1), ("c", SLOW, 1)))
    step_s = plan_cluster(cluster, WORKLOAD).estimates
    assert step_s is not None
    hopeless = Objective("fewest-gpus", 1000.0, 0.5 * 1000 * step_s.step_time_s)
    with pytest.raises(InfeasiblePlanError, match="No plan was found that keeps --deadline") as e:
        plan_cluster(cluster, WORKLOAD, objective=hopeless)
    hours = float(str(e.value).split("would keep --deadline ")[1].split(" h")[0])
    assert hours == pytest.approx(1000 * step_s.step_time_s / 3600, rel=2e-3)
    # What the message names is enough.
    plan_cluster(cluster, WORKLOAD, objective=replace(hopeless, deadline_s=hours * 3600))
    dear = replace(cluster, limits=Limits(memory_reserve_bytes=0, max_price_per_hour=1.0))
    with pytest.raises(InfeasiblePlanError, match=r"would keep limits.max_price_per_hour 4\."):
        plan_cluster(dear, WORKLOAD)


def test_what_an_objective_lacks_is_named() -> None:
    for objective, words in (
        (Objective("cheapest"), "--objective cheapest needs the price .* has none for a, b, c"),
        (Objective("fewest-gpus"), "give --deadline"),
        (Objective(deadline_s=10.0), "--deadline is for a whole training run"),
        (Objective(budget=10.0), "--budget is for a whole training run"),
        (Objective(num_steps=1.0, budget=10.0), "--budget needs the price"),
    ):
        with pytest.raises(UsageError, match=words):
            plan_cluster(CLUSTER, WORKLOAD, objective=objective)


def test_stock_plans_only() -> None:
    plan, explanation = plan_and_explain(CLUSTER, WORKLOAD, objective=Objective(stock_only=True))
    assert is_stock(plan)
    problem = make_problem(CLUSTER, WORKLOAD)
    board = search(problem)
    assert board.best is not None and board.best.rank_order is None
    assert plan.estimates is not None and board.best_stock is not None
    simulated = simulate_plan(plan, CLUSTER, is_stock=True)
    assert plan.estimates.step_time_s == pytest.approx(simulated.step_time_s, rel=1e-3)
    # The job's settings may change with it, which the board's own plan of stock keeps; the board's
    # price has no sends of stock.
    other = simulate_plan(bare_plan(problem, board.best_stock, {}), CLUSTER, is_stock=True)
    assert plan.estimates.step_time_s <= other.step_time_s
    cheap = Objective("cheapest", stock_only=True)
    plan, explanation = plan_and_explain(priced(), WORKLOAD, objective=cheap)
    assert is_stock(plan) and explanation.outcome is not None
    any_plan = plan_and_explain(priced(), WORKLOAD, objective=Objective("cheapest"))[1].outcome
    assert any_plan is not None
    assert any_plan.value <= explanation.outcome.value < inf


@pytest.mark.parametrize("name", ["throughput", "fewest-gpus"])
def test_that_none_can_is_said_only_where_it_is_proved(name: ObjectiveName) -> None:
    """A deadline between the bound and the best plan may be kept by a plan that was not found."""
    small = make_cluster(("a", FAST, 2), ("b", SLOW, 1))
    # Five layers divide badly, so the best plan is well above the bound.
    workload = make_workload(num_layers=5)
    limits = Limits(memory_reserve_bytes=0, no_tensor_parallel_across=())
    for cluster, is_whole in ((small, True), (replace(small, limits=limits), False)):
        estimates = plan_cluster(cluster, workload).estimates
        assert estimates is not None and estimates.bound_s is not None
        between_s = (2 * estimates.bound_s + estimates.step_time_s) / 3
        assert estimates.bound_s * 1.001 < between_s < estimates.step_time_s / 1.001
        for deadline_s, is_proved in ((between_s, False), (0.5 * estimates.bound_s, is_whole)):
            with pytest.raises(InfeasiblePlanError) as raised:
                plan_cluster(cluster, workload, objective=Objective(name, 1, deadline_s))
            assert ("proved" in str(raised.value)) == is_proved
