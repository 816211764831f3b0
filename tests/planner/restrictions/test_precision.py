"""The precision of a job that names none: of those that its GPUs have, the faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.faster_flags import faster_flags
from megatron_hetero.planner.restrictions.precision import (
    in_best_precision,
    precisions,
    with_precision,
)
from megatron_hetero.report.text.faster_flags import faster_flag_lines
from tests.cost.builders import FAST, FREE, INSIDE, OLD, make_cluster, make_workload

JOB = make_workload(num_layers=4, global_batch_size=16)
UNNAMED = with_precision(JOB, "fp32")
QUICK = replace(FAST, name="QUICK", peak_flops={**FAST.peak_flops, "bf16": None})
SLOWEST = replace(OLD, name="SLOWEST", peak_flops={**OLD.peak_flops, "fp16": 1e12})
ANCIENT = replace(OLD, name="ANCIENT", peak_flops={**OLD.peak_flops, "fp16": None})


def box(*gpus: GpuType, limits: Limits = FREE) -> Cluster:
    nodes = [(f"n{i}", gpu, 1) for i, gpu in enumerate(gpus)]
    return make_cluster(*nodes, between=INSIDE, limits=limits)


def chosen(cluster: Cluster, workload: Workload = UNNAMED) -> tuple[Plan, str]:
    found = in_best_precision(
        lambda job: plan_cluster(cluster, job), lambda plan: plan, cluster, workload
    )
    return found.found, found.words


@pytest.mark.parametrize(
    ("gpus", "choices"),
    [
        ((FAST, FAST), ("bf16",)),
        ((FAST, OLD), ("bf16", "fp16")),
        ((OLD, OLD), ("fp16",)),
        ((FAST, ANCIENT), ("bf16", "fp32")),
        ((ANCIENT,), ("fp32",)),
        ((OLD, ANCIENT), ("fp16", "fp32")),
    ],
)
def test_what_may_be_chosen(gpus: tuple[GpuType, ...], choices: tuple[Precision, ...]) -> None:
    assert precisions(box(*gpus), UNNAMED) == choices
    assert precisions(box(*gpus), with_precision(JOB, "bf16")) == ("bf16",)
    held = box(*gpus, limits=replace(FREE, as_given=("precision",)))
    assert precisions(held, UNNAMED) == ("fp32",)


def test_all_gpus_train_in_fp16_where_that_is_faster() -> None:
    plan, words = chosen(box(FAST, QUICK))
    assert plan.workload is not None and plan.workload.training.precision == "fp16"
    assert plan.workload.megatron_args[-1] == "--fp16"
    assert not plan.idle_devices
    assert "QUICK has no bf16" in words and "in bf16: " in words


def test_bf16_stays_where_the_others_are_too_slow_to_help() -> None:
    other = replace(FAST, peak_flops={**FAST.peak_flops, "fp16": 150e12})
    plan, words = chosen(box(other, SLOWEST))
    assert plan.workload is not None and plan.workload.training.precision == "bf16"
    assert plan.idle_devices == ("n1:0",)
    assert "in fp16: " in words


def test_all_have_bf16() -> None:
    plan, words = chosen(box(FAST, FAST))
    assert plan.workload is not None and plan.workload.megatron_args[-1] == "--bf16"
    assert words == "Precision: bf16, for the job names none and all GPUs have it"


def test_a_job_that_names_one_keeps_it_without_words() -> None:
    plan, words = chosen(box(FAST, OLD), with_precision(JOB, "bf16"))
    assert plan.workload is not None and plan.workload.training.precision == "bf16"
    assert words == ""


def test_fp16_is_offered_to_a_bf16_job_at_the_price_of_its_best_plan() -> None:
    cluster = box(FAST, QUICK)
    named = with_precision(JOB, "bf16")
    (gain,) = [g for g in faster_flags(plan_cluster(cluster, named), cluster) if g.in_place_of]
    assert gain.flags == ("--fp16",) and gain.in_place_of == "--bf16"
    other = plan_cluster(cluster, with_precision(named, "fp16"))
    assert other.estimates is not None
    assert gain.step_time_s == other.estimates.step_time_s < gain.from_s
    (line,) = faster_flag_lines([gain])
    assert str(line).startswith("with --fp16 in place of --bf16 the 1 QUICK train too: ")
    with_fp16 = plan_cluster(cluster, with_precision(named, "fp16"))
    assert not [g for g in faster_flags(with_fp16, cluster) if g.in_place_of]
