"""`plan --schedule best`: other orders of computations where they make the step shorter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import UsageError
from megatron_hetero.flags.emit import megatron_args
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.objective import Objective
from megatron_hetero.schedule.choice.best import best_of_orders
from megatron_hetero.schedule.choice.choose import candidates
from megatron_hetero.schedule.estimate import estimate_plan, plan_cost
from megatron_hetero.schedule.simulator.step import simulate_plan

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = load_cluster(ROOT / "benchmarks/rehearsal/three-and-one.yaml")
FLAGS = ("--num-layers=24", "--global-batch-size=16")
"""Four GPUs much alike with few micro-batches: fill and drain are worth shortening."""


def _workload() -> Workload:
    return load_workload(ROOT / "examples/a100-rtx4090/gpt-7b.sh", FLAGS)


def test_chunks_where_they_shorten_fill_and_drain() -> None:
    workload = _workload()
    # A stage for each GPU: the fill is that of four.
    cluster = replace(CLUSTER, limits=replace(CLUSTER.limits, max_tensor_parallel=1))
    counts = plan_cluster(cluster, workload)
    best, explanation = plan_and_explain(cluster, workload, schedules="best")
    assert counts.estimates is not None and best.estimates is not None
    assert best.schedule == "interleaved"
    assert best.estimates.step_time_s < 0.99 * counts.estimates.step_time_s
    simulated = simulate_plan(best, cluster, workload)
    assert best.estimates.step_time_s == pytest.approx(simulated.step_time_s, rel=2e-3)
    assert explanation.step_time_s == best.estimates.step_time_s
    # The bound of launch counts is no bound of chunks, whose fill is shorter; that of the work is.
    assert best.estimates.bound_s is not None and counts.estimates.bound_s is not None
    assert best.estimates.bound_s < counts.estimates.bound_s
    assert "pipeline fill" in best.estimates.bound_relaxes
    assert any(word.startswith("--hetero") for word in megatron_args(best, "plan.json"))


def test_every_schedule_offered_fits_with_its_messages() -> None:
    workload = load_workload(
        ROOT / "benchmarks/settings/case-study-13b/model.flags", ("--global-batch-size=24",)
    )
    cluster = load_cluster(ROOT / "benchmarks/settings/case-study-13b/cluster.yaml")
    plan = plan_cluster(cluster, workload, strategy="columns")
    offered = [c.plan for c in candidates(plan, cluster) if c.plan is not None]
    assert len(offered) > 1
    for made in offered:
        devices = estimate_plan(made, cluster).devices
        assert all(d.peak_bytes <= d.capacity_bytes for d in devices.values())


def test_the_price_of_orders_is_their_simulation() -> None:
    """The exchange begins when the stages end under the orders, not under 1F1B with as many
    forwards ahead."""
    cluster = load_cluster(ROOT / "examples/two-sites/cluster.yaml")
    workload = load_workload(ROOT / "examples/two-sites/gpt-2.7b.flags")
    plan = plan_cluster(cluster, workload, strategy="columns")
    assert len(plan.replicas) > 1
    costs = CostModel(cluster, workload)
    offered = [c.plan for c in candidates(plan, cluster) if c.plan is not None]
    assert {made.schedule for made in offered} >= {"1f1b", "interleaved", "synthesised"}
    for made in offered:
        priced = plan_cost(made, costs, placement_of(made, cluster))
        simulated = simulate_plan(made, cluster, workload)
        assert priced.step_time_s == pytest.approx(simulated.step_time_s, rel=0.02)
        for replica, stages in zip(priced.replicas, simulated.stages, strict=True):
            assert replica.ends_s == pytest.approx([stage.compute_end_s for stage in stages])


def test_growing_batches_keep_their_counts() -> None:
    workload = _workload()
    plan = plan_cluster(CLUSTER, workload)
    growing = (*workload.megatron_args, "--step-batch-size-schedule", "0:8 10:16")
    plan = replace(plan, workload=replace(workload, megatron_args=growing))
    assert best_of_orders(plan, [], CLUSTER) is plan


def test_stock_megatron_has_no_orders_of_its_own_choice() -> None:
    with pytest.raises(UsageError, match="--schedule best"):
        plan_cluster(CLUSTER, _workload(), schedules="best", strategy="stock")
    with pytest.raises(UsageError, match="--schedule best"):
        plan_cluster(CLUSTER, _workload(), schedules="best", objective=Objective(stock_only=True))


def test_a_schedule_that_the_limits_keep_is_kept() -> None:
    limits = replace(CLUSTER.limits, as_given=("schedule",))
    with pytest.raises(UsageError, match=r"limits\.as_given"):
        plan_cluster(replace(CLUSTER, limits=limits), _workload(), schedules="best")


def test_what_layers_lose_that_cannot_split_a_backward_pass() -> None:
    """Transformer Engine's have no zero bubble: the refusal says how much shorter it would be."""
    flags = ("--num-layers=12", "--global-batch-size=16")  # fewer layers, which leave room
    plan = plan_cluster(CLUSTER, load_workload(ROOT / "examples/a100-rtx4090/gpt-7b.sh", flags))
    assert plan.workload is not None
    split = candidates(plan, CLUSTER, in_full=True)[2]
    assert split.plan is None and "only --transformer-impl local" in split.held
    # The same prices, of a job that does not say which layers it has.
    unsaid = replace(plan, workload=replace(plan.workload, megatron_args=()))
    plain, _, able, _ = candidates(unsaid, CLUSTER, in_full=True)
    assert able.plan is not None, able.held
    gain = 1 - able.slowest_s / plain.slowest_s
    assert gain > 0
    assert f"it would be {gain:.1%} shorter than 1F1B" in split.held
