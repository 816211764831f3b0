"""Plans that the proof of operations refuses: the next best comes in their place, and is named.

A communicator for each direction in place of six makes plans hang that launch far ahead.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError, PlanFormatError
from megatron_hetero.plan.communication import under_way
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.evaluate import hanging
from megatron_hetero.planner.replan.replanning import replan
from megatron_hetero.report.text.comparison import refused_lines
from megatron_hetero.schedule.choice import best
from megatron_hetero.schedule.proof.check import check_operations
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload

JOB = make_workload(num_layers=8, global_batch_size=24)


def far_apart() -> Cluster:
    """Two GPUs, each too small for the model, over a hop so slow that far launches pay."""
    fast, slow = (replace(gpu, memory_bytes=400 << 20) for gpu in (FAST, SLOW))
    return make_cluster(
        ("a", fast, 1), ("b", slow, 1), between=Link(3e9, 6e-3), sites=("here", "there")
    )


def test_the_next_best_plan_comes_in_place_of_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fastest, explained = plan_and_explain(far_apart(), JOB)
    launched = fastest.replicas[0].stages[0].num_launched_forwards
    assert launched is not None and launched > 5
    assert not explained.refused
    assert not list(refused_lines(explained))
    # With a communicator for each direction no job could run it.
    monkeypatch.setattr(under_way, "_MOST", 1)
    with pytest.raises(PlanFormatError, match="on GPUs this plan hangs"):
        check_operations(fastest, JOB)
    plan, explained = plan_and_explain(far_apart(), JOB)
    check_operations(plan, JOB)
    assert plan.estimates is not None
    assert fastest.estimates is not None
    assert plan.replicas[0].stages[0].num_launched_forwards == 5
    assert plan.estimates.step_time_s > fastest.estimates.step_time_s
    # It says so, and plans without an explanation are the same.
    first = explained.refused[0]
    assert first.layout == format_layout(fastest.layout)
    assert first.step_time_s == pytest.approx(fastest.estimates.step_time_s)
    (words,) = refused_lines(explained)
    step = f"{1e3 * first.step_time_s:.3g} ms a step"
    assert words.startswith(f"No job could run the fastest plan, {first.layout} ({step})")
    assert "rank 0 " in words
    assert "This is the next best plan that runs" in words
    alone = plan_cluster(far_apart(), JOB)
    assert alone.replicas == plan.replicas
    # Five forwards are the most that may be launched.
    for further in range(6, 25):
        deep = replace(plan.replicas[0].stages[0], num_launched_forwards=further)
        stages = (deep, *plan.replicas[0].stages[1:])
        with pytest.raises(PlanFormatError):
            check_operations(replace(plan, replicas=(replace(plan.replicas[0], stages=stages),)),
                             JOB)  # fmt: skip


def test_orders_that_hang_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "_MOST", 1)
    fast, slow = (replace(gpu, memory_bytes=400 << 20) for gpu in (FAST, SLOW))
    nodes = ("a", fast, 1), ("b", slow, 1), ("c", slow, 1)
    free = make_cluster(*nodes, between=Link(3e9, 5e-4), limits=FREE)
    check_operations(plan_cluster(free, JOB, schedules="best"), JOB)
    # Without the proof it would be one of them.
    monkeypatch.setattr(best, "_ends", lambda plan: True)
    with pytest.raises(PlanFormatError, match="hangs"):
        check_operations(plan_cluster(free, JOB, schedules="best"), JOB)


def test_replanning_leaves_out_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "_MOST", 1)
    old = plan_cluster(far_apart(), JOB)
    for way in replan(old, far_apart()).ways:
        check_operations(way.plan, JOB)


def test_where_no_plan_runs_the_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise PlanFormatError("on GPUs this plan hangs; each rank waits for the next: all")

    monkeypatch.setattr(hanging, "check_operations", never)
    with pytest.raises(InfeasiblePlanError, match=r"nor the next \d+") as refused:
        plan_cluster(far_apart(), JOB)
    assert "max_pipeline_parallel: 1" in str(refused.value)
