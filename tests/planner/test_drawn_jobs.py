"""Drawn clusters with the flags that people have: what holds of every plan."""

from __future__ import annotations

from random import Random

import pytest

from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.planner.api import plan_and_explain
from megatron_hetero.planner.request import PLUGIN_GAIN
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from tools.drawn_clusters import drawn_job, random_of

FLAGS = (
    ("--use-distributed-optimizer",),
    ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ("--overlap-grad-reduce",),
    ("--grad-reduce-in-bf16",),
    ("--sequence-parallel",),
    ("--transformer-impl", "local"),
    ("--fp8-format", "hybrid"),
    ("--seq-length", "8192", "--max-position-embeddings", "8192"),
    ("--sequence-parallel", "--num-experts", "8", "--moe-router-topk", "2", "--moe-grouped-gemm"),
)
_HASH = "efed485f"


@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 40))]
)
def test_a_drawn_job_has_a_valid_plan_that_simulation_confirms(number: int) -> None:
    job = drawn_job(random_of(_HASH, "flags", number))
    cluster, _ = job.load()
    chosen = Random(number).sample(FLAGS, 2)
    workload = load_workload(None, (*job.flags, *chosen[0], *chosen[1]))
    try:
        plan, explanation = plan_and_explain(cluster, workload, plugin_gain=PLUGIN_GAIN)
    except InfeasiblePlanError:
        return
    validate_plan(plan, cluster)
    estimates = plan.estimates
    assert estimates is not None
    step_s = estimates.step_time_s
    assert estimates.bound_s is None or estimates.bound_s <= step_s * (1 + 1e-9)
    assert estimate_plan(plan, cluster, bounded=False).step_time_s == pytest.approx(step_s)
    simulated = simulate_plan(plan, cluster)
    assert simulated.step_time_s == pytest.approx(step_s, rel=0.02)
    for stage in simulated.timelines:
        for name, peak_bytes in zip(stage.devices, stage.device_peak_bytes, strict=True):
            device = cluster.device_by_name[name]
            assert peak_bytes <= cluster.gpu_type(device).memory_bytes
    # Nothing beside it is faster by more than what a plan gives up to be stock's.
    for other in (explanation.best_stock, *explanation.by_hand):
        assert other is None or other.slower_by >= -1e-3
