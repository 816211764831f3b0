"""Stages in precisions of their own: chosen by the GPUs, priced, refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.faster_flags import MIXED, faster_flags
from megatron_hetero.planner.restrictions.mixture import mixture_words, with_mixed_precisions
from megatron_hetero.schedule.stock import is_stock
from tests.cost.builders import FAST, OLD, estimate_plan, make_workload
from tests.planner.restrictions.test_precision import ANCIENT, QUICK, box

JOB = make_workload(num_layers=4, global_batch_size=16)
MIXED_JOB = with_mixed_precisions(JOB)


def test_each_stage_computes_in_what_its_gpus_have() -> None:
    cluster = box(FAST, QUICK, QUICK)
    plan, explanation = plan_and_explain(cluster, MIXED_JOB)
    types = plan.type_by_device
    found = {
        types[device]: stage.precision
        for replica in plan.replicas
        for stage in replica.stages
        for device in stage.devices
    }
    assert found == {"FAST": None, "QUICK": "fp16"}
    assert not plan.idle_devices and not is_stock(plan)
    assert plan.estimates is not None and plan.estimates.bound_s is not None
    assert plan.estimates.bound_s <= plan.estimates.step_time_s
    # Read back, the plan costs what the search said.
    again = estimate_plan(plan, cluster)
    assert again.step_time_s == pytest.approx(plan.estimates.step_time_s)
    words = mixture_words(plan)
    assert "bf16 on 1 FAST" in words and "fp16 on 2 QUICK" in words
    assert not mixture_words(plan_cluster(cluster, JOB))
    # Stock Megatron, beside it, trains in one precision, on the one card that has it.
    stock = explanation.best_stock
    assert stock is not None and stock.step_time_s > plan.estimates.step_time_s


def test_without_being_asked_such_gpus_are_idle_and_the_gain_is_said() -> None:
    cluster = box(FAST, QUICK, QUICK)
    plan = plan_cluster(cluster, JOB)
    assert len(plan.idle_devices) == 2
    mixed = plan_cluster(cluster, MIXED_JOB)
    (gain,) = [gain for gain in faster_flags(plan, cluster) if gain.flags == (MIXED,)]
    assert mixed.estimates is not None
    assert gain.step_time_s == pytest.approx(mixed.estimates.step_time_s)
    assert gain.joining == "2 QUICK"


def test_a_gpu_with_neither_half_precision_computes_in_fp32() -> None:
    cluster = box(FAST, ANCIENT)
    costs = CostModel(cluster, MIXED_JOB)
    stages = [PlacedStage((device,), 2) for device in cluster.devices]
    assert [costs.own_precision(stage) for stage in stages] == [None, "fp32"]
    in_fp32 = CostModel(cluster, replace(JOB, training=replace(JOB.training, precision="fp32")))
    own, all_fp32 = (c.stage_pieces(stages[1], 1024) for c in (costs, in_fp32))
    assert own.layer == all_fp32.layer
    # What crosses has the narrower side's bytes.
    narrow, wide = costs.stage_hop(*stages), in_fp32.stage_hop(*stages)
    assert narrow.serialisation_s < wide.serialisation_s


def test_fp16_beside_bf16_keeps_gradients_in_fp32() -> None:
    cluster = box(FAST, OLD)
    costs = CostModel(cluster, MIXED_JOB)
    half = [costs.memory(node, 1, True, False, 1, 1024).per_layer for node in cluster.nodes]
    assert half[0]["gradients"] == half[1]["gradients"]
    assert half[0]["weights"] == half[1]["weights"]


def test_a_group_computes_in_what_all_of_it_have() -> None:
    cluster = box(FAST, OLD)
    costs = CostModel(cluster, MIXED_JOB)
    assert costs.own_precision(PlacedStage(cluster.devices, 4)) == "fp16"


def test_what_does_not_go_with_it_is_refused() -> None:
    training = replace(MIXED_JOB.training, grad_reduce_in_bf16=True)
    with pytest.raises(UnsupportedError, match="--grad-reduce-in-bf16"):
        plan_cluster(box(FAST, OLD), replace(MIXED_JOB, training=training))


def test_plans_name_no_precision_that_gpus_lack() -> None:
    cluster = box(FAST, QUICK)
    plan = plan_cluster(cluster, MIXED_JOB)
    wrong = replace(
        plan,
        replicas=tuple(
            replace(r, stages=tuple(replace(s, precision="bf16") for s in r.stages))
            for r in plan.replicas
        ),
    )
    with pytest.raises(UnsupportedError, match="QUICK cannot compute in bf16"):
        estimate_plan(wrong, cluster)
