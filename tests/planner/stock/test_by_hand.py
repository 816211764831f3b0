"""What people do by hand: equal layers at one width."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.spec import Cluster, Limits, Link
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.explain import Explanation
from megatron_hetero.planner.api import plan_and_explain
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.by_hand import plans_by_hand
from megatron_hetero.planner.stock.limits import limits_beside_a_plan
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock, reasons_not_stock
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

MIXED = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
JOB = make_workload(num_layers=8, global_batch_size=8, seq_length=512, hidden_size=512)


def test_all_gpus_and_without_the_slower_ones() -> None:
    everything, fast = plans_by_hand(make_problem(MIXED, JOB))
    assert {d for r in fast.plan.replicas for s in r.stages for d in s.devices} == {"a:0", "a:1"}
    assert sum(len(s.devices) for r in everything.plan.replicas for s in r.stages) == 4
    for found in (everything, fast):
        layers = {s.shape.num_layers for r in found.plan.replicas for s in r.stages}
        assert len(layers) == 1 and reasons_not_stock(found.plan) == ()
        assert found.plan.workload == JOB


def test_the_step_is_no_longer_than_the_simulated_one_and_never_better_than_stocks_best() -> None:
    problem = make_problem(MIXED, JOB)
    best = best_stock_plan(problem)
    assert best is not None
    for found in plans_by_hand(problem):
        step = simulate_plan(found.plan, problem.cluster, is_stock=True)
        assert found.step_time_s <= step.step_time_s * (1 + 1e-9)
        assert best.step_time_s <= step.step_time_s * (1 + 1e-9)


def test_equal_gpus_have_one_row_and_what_does_not_fit_none() -> None:
    equal = make_cluster(("a", FAST, 4))
    assert len(plans_by_hand(make_problem(equal, JOB))) == 1
    small = tuple(
        replace(n, gpu_type=replace(n.gpu_type, memory_bytes=1 << 20)) for n in MIXED.nodes
    )
    assert plans_by_hand(make_problem(replace(MIXED, nodes=small), JOB)) == ()


def plan_of(cluster: Cluster, gain: float | None) -> tuple[Plan, Explanation]:
    job = make_workload(num_layers=6, global_batch_size=8, seq_length=2048, hidden_size=4096)
    return plan_and_explain(cluster, job, plugin_gain=gain)


def test_a_plan_that_gains_too_little_gives_way_to_stock_megatron() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 2), between=Link(2e10, 1e-5))
    free = replace(cluster, limits=Limits(as_given=("micro_batch_size",)))
    plain, beside = plan_of(free, None)
    assert not is_stock(plain) and beside.best_stock is not None
    assert [row.strategy for row in beside.by_hand] == [
        "by hand: equal layers, all GPUs",
        "by hand: without the slower cards",
    ]
    behind = beside.best_stock.slower_by
    assert behind > 0
    same, _ = plan_of(free, behind / 2)
    assert same == plain
    stock, explained = plan_of(free, behind * 1.01)
    assert is_stock(stock) and explained.fastest is not None
    assert explained.fastest.slower_by < 0


def test_beside_a_plan_the_search_is_near_the_whole_one() -> None:
    problem = make_problem(MIXED, JOB)
    limits = limits_beside_a_plan(len(MIXED.devices))
    whole, short = best_stock_plan(problem), best_stock_plan(problem, limits)
    assert whole is not None and short is not None
    assert short.step_time_s <= 1.02 * whole.step_time_s
    assert short.num_simulated <= limits.num_simulated
