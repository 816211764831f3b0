"""Measured beside predicted times of stages: the arithmetic, and a real job with a slow rank."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.plan.build import canonical_hosts, in_rank_order
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.observe.stage_ratio import (
    StageRatio,
    possible_gain,
    ratio_lines,
    scalars,
    stage_ratios,
)
from tests.plan.strategies import RTX_4090, cluster_of, node, place

LAYOUT = "tp1:6,tp1:2 @4 | tp1:8 @2 | tp1:8 @2"
CLUSTER = cluster_of(node("a", 1), node("b", 3, RTX_4090))


def planned(measured: bool = True) -> Plan:
    """Return a plan on a:0 and b:0, then b:1, then b:2; a stage is predicted to take 10 ms a
    layer."""
    layout = parse_layout(LAYOUT)
    replicas = place(list(layout.replicas), ["a:0", "b:0", "b:1", "b:2"])
    hosts = canonical_hosts(replicas, CLUSTER)
    estimates = Estimates(
        step_time_s=1.0,
        tokens_per_s=1.0,
        bound_s=None,
        gap=None,
        replica_times_s=(0.3, 0.3, 0.3),
        stage_times_s=((0.06, 0.02), (0.08,), (0.08,)),
        boundary_times_s=((0.0,), (), ()),
        gradient_sync_s=0.0,
        devices={},
        measured=measured,
    )
    return Plan(in_rank_order(replicas, hosts), hosts=hosts, estimates=estimates)


def test_as_predicted_there_is_nothing_to_say_but_the_ratios() -> None:
    plan = planned()
    ratios = stage_ratios(plan, [0.06, 0.02, 0.08, 0.08])
    lines = list(ratio_lines(plan, ratios))
    assert lines[0].endswith("r0 s0 1.00, r0 s1 1.00, r1 s0 1.00, r2 s0 1.00")
    assert lines[1] == "by GPU type: A100-40GB 1.00, RTX-4090 1.00"
    assert not any("straggler" in line for line in lines)


def test_a_straggler_is_named_beside_its_own_type() -> None:
    """All RTX are slower than predicted, one of them much more; the A100 is no straggler."""
    plan = planned()
    lines = list(ratio_lines(plan, stage_ratios(plan, [0.06, 0.024, 0.096, 0.144])))
    stragglers = [line for line in lines if "straggler" in line]
    assert stragglers == ["straggler: b:2 (RTX-4090, rank 3) takes 50% longer than its type"]
    found = scalars(stage_ratios(plan, [0.06, 0.024, 0.096, 0.144]))
    assert found["stage-ratio/replica-2-stage-0"] == pytest.approx(1.8)
    assert found["gpu-type-ratio/RTX-4090"] == pytest.approx(1.2)


def test_the_gain_of_another_division_is_that_of_equal_rates() -> None:
    """6 layers at 60 ms and 2 at 60 ms: rates 100 + 33 layers/s, 8 layers in 60 ms: none better
    than 8 / 133 s = 60 ms; at 120 ms for the first, 8 / 83 s = 96 ms of 120."""
    plan = planned()
    even = stage_ratios(plan, [0.06, 0.06, 0.01, 0.01])
    assert possible_gain(plan, even) == pytest.approx(0.0, abs=1e-9)
    slow = stage_ratios(plan, [0.12, 0.06, 0.01, 0.01])
    assert possible_gain(plan, slow) == pytest.approx(0.2)
    assert any("up to 20%" in line for line in ratio_lines(plan, slow))


def test_figures_of_gpus_are_not_compared_with_a_cpu() -> None:
    assert StageRatio.applies(planned())
    assert not StageRatio.applies(planned(measured=False))
    assert not StageRatio.applies(replace(planned(), estimates=None))


def test_a_job_logs_its_stages_and_finds_a_slow_rank(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(planned(), path)
    argv = [
        "--num-layers=8", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=16",
        "--max-position-embeddings=16", "--micro-batch-size=1", "--global-batch-size=8",
        "--lr=1e-3", "--train-iters=2", "--mock-data", "--tokenizer-type=NullTokenizer",
        "--vocab-size=100", "--eval-iters=0", "--eval-interval=1000", "--log-interval=1",
        "--num-workers=0", f"--data-cache-path={tmp_path / 'cache'}", f"--hetero-plan={path}",
    ]  # fmt: skip

    def train(rank: int) -> None:
        from megatron.core.pipeline_parallel import schedules

        from megatron_hetero.runtime.job import entry
        from tests.runtime.flag_runs import read_few_mock_documents

        read_few_mock_documents()
        if rank == 3:
            right = schedules.forward_step

            def slow(*given: Any, **named: Any) -> Any:
                time.sleep(1.0)
                return right(*given, **named)

            schedules.forward_step = slow
        entry.main(argv)

    run_jobs([LocalJob("job", 4, train, tmp_path)], 110)
    log = (tmp_path / "rank-3.log").read_text()
    steps = re.findall(
        r" \[plan\] iteration +2 \| step: (\S+) s, predicted 1 s \((\S+) times\)", log
    )
    assert len(steps) == 1 and float(steps[0][0]) >= 2  # rank 3 sleeps twice in a step
    assert float(steps[0][1]) == pytest.approx(float(steps[0][0]), abs=0.01)
    assert not re.findall(r" \[plan\] iteration +1 ", log)
    lines = re.findall(r" \[stages\] iteration +2 \| (.*) \|", log)
    assert any(line.startswith("measured / predicted") for line in lines)
    assert any(line.startswith("straggler: b:2 (RTX-4090, rank 3)") for line in lines)
