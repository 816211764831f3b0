"""What people do by hand: equal layers at one width."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.explain import Explanation
from megatron_hetero.planner.api import plan_and_explain
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.by_hand import plans_by_hand
from megatron_hetero.planner.stock.limits import StockLimits, limits_beside_a_plan
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock, reasons_not_stock
from tests.cost.builders import FAST, OLD, SLOW, make_cluster, make_workload

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


def gpus_of_rows(cluster: Cluster, job: Workload) -> dict[str, set[str]]:
    """Return the types of the GPUs of each row, by the row's name."""
    type_of = {node.name: node.gpu_type.name for node in cluster.nodes}
    return {
        found.name: {
            type_of[device.split(":")[0]]
            for replica in found.plan.replicas
            for stage in replica.stages
            for device in stage.devices
        }
        for found in plans_by_hand(make_problem(cluster, job))
    }


def test_the_faster_cards_are_those_of_the_shorter_layer_not_of_the_higher_peak() -> None:
    a100, l40s, l4 = (gpu_type(name) for name in ("A100-80GB", "L40S", "L4"))
    peaks = [gpu.peak_flops["bf16"] or 0.0 for gpu in (a100, l40s)]
    assert peaks[0] < peaks[1]
    job = make_workload(num_layers=8, hidden_size=2048, global_batch_size=48, seq_length=4096)
    nodes = ("a", a100, 8), ("l", l40s, 4)
    for more in ((), (("b", l4, 4),)):
        rows = gpus_of_rows(make_cluster(*nodes, *more), job)
        assert rows["by hand: without the slower cards"] == {"A100-80GB"}
    # Equal layers on 12 GPUs need the factor 3 in the layers or in the batch.
    both = "by hand: equal layers, all GPUs"
    assert gpus_of_rows(make_cluster(*nodes), job)[both] == {"A100-80GB", "L40S"}
    job = make_workload(num_layers=8, hidden_size=2048, global_batch_size=64, seq_length=4096)
    assert both not in gpus_of_rows(make_cluster(*nodes), job)


@pytest.mark.parametrize(
    ("cards", "fast"),
    [
        (("A100-40GB", "A100-80GB"), None),
        (("H100-80GB", "H200"), None),
        (("A100-40GB", "A100-80GB", "L4"), {"A100-40GB", "A100-80GB"}),
        (("H100-80GB", "H200", "A100-40GB", "A100-80GB"), {"H100-80GB", "H200"}),
        (("H100-80GB", "A100-80GB"), {"H100-80GB"}),
    ],
)
def test_cards_of_nearly_the_same_layer_are_not_told_apart(
    cards: tuple[str, ...], fast: set[str] | None
) -> None:
    cluster = make_cluster(*((f"n{i}", gpu_type(name), 4) for i, name in enumerate(cards)))
    job = make_workload(num_layers=8, hidden_size=2048, global_batch_size=48, seq_length=4096)
    assert gpus_of_rows(cluster, job).get("by hand: without the slower cards") == fast


def test_a_slower_card_is_cut_from_a_tenth_of_a_layer_on() -> None:
    found = set()
    for percent in (4, 8, 20, 40):
        more = 1 + percent / 100
        peaks = {of: peak and peak / more for of, peak in FAST.peak_flops.items()}
        bytes_per_s = FAST.memory_bytes_per_s / more
        slower = replace(FAST, name="SLOWER", peak_flops=peaks, memory_bytes_per_s=bytes_per_s)
        cluster = make_cluster(("a", FAST, 2), ("b", slower, 2))
        problem = make_problem(cluster, JOB)
        fast_s, slow_s = (problem.costs.pieces(n, 1, 1024).layer.total_s for n in problem.nodes)
        is_cut = "by hand: without the slower cards" in gpus_of_rows(cluster, JOB)
        assert is_cut == (slow_s > 1.1 * fast_s)
        found.add(is_cut)
    assert found == {True, False}


def test_a_card_without_the_jobs_precision_counts_as_the_slowest() -> None:
    slower = replace(SLOW, peak_flops={**SLOW.peak_flops, "bf16": 10e12})
    cluster = make_cluster(("a", slower, 2), ("b", OLD, 2))
    job = replace(JOB, training=replace(JOB.training, mixes_precisions=True))
    costs = make_problem(cluster, job).costs
    slow_s, old_s = (costs.pieces(node, 1, 1024).layer.total_s for node in cluster.nodes)
    assert old_s < slow_s
    assert gpus_of_rows(cluster, job)["by hand: without the slower cards"] == {"SLOW"}


OVERLAPS = replace(
    JOB,
    training=replace(
        JOB.training,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
)


@pytest.mark.parametrize("job", [JOB, OVERLAPS])
@pytest.mark.parametrize("between", [Link(1e10, 1e-5), Link(3e8, 1e-5)])
def test_the_step_is_the_simulated_one_and_never_better_than_stocks_best(
    job: Workload, between: Link
) -> None:
    cluster = make_cluster(("a", FAST, 2), ("b", FAST, 2), ("c", SLOW, 2), between=between)
    problem = make_problem(cluster, job)
    # Few steps simulated or many: what people do by hand is known to either search.
    searches = best_stock_plan(problem), best_stock_plan(problem, StockLimits(num_simulated=1))
    rows = plans_by_hand(problem)
    assert rows
    for found in rows:
        step_s = simulate_plan(found.plan, cluster).step_time_s
        assert found.step_time_s == pytest.approx(step_s)
        for best in searches:
            assert best is not None and best.step_time_s <= step_s * (1 + 1e-9)


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
