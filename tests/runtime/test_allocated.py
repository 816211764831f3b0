"""The plan's peak of tensors, against the peak that torch allocates in a whole run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.lab.kit.small_job import TRAINING, on_this_backend
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.arguments import HeteroArguments
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.world import World
from megatron_hetero.schedule.estimate import estimate_plan
from tests.cost.builders import make_cluster, place_plan

CPU = GpuType("CPU", 1 << 40, 1e10, dict.fromkeys(("bf16", "fp16", "fp32"), 1e11), "8.0", "a test")

JOB = (
    "--num-layers=4",
    "--hidden-size=256",
    "--num-attention-heads=16",
    "--seq-length=512",
    "--max-position-embeddings=512",
    "--vocab-size=1000",
    "--micro-batch-size=1",
    "--global-batch-size=4",
    "--attention-dropout=0",
    "--hidden-dropout=0",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(), ("--swiglu", "--group-query-attention", "--num-query-groups=4")]
)
def test_unfused_attention_allocates_what_the_plan_estimates(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Shares no formula with the prediction: torch's own record of every allocation and release."""
    job = (*JOB, *flags)
    workload = load_workload(None, job)
    training = replace(workload.training, flash_attention=False, fused_activation=False)
    plan = plan_from_layout(parse_layout("tp1:4 @4"), replace(workload, training=training))
    cluster = make_cluster(("cpu", CPU, 1), between=Link(1e9, 1e-5))
    parts = estimate_plan(place_plan(plan, cluster), cluster).devices["cpu:0"].parts_bytes
    predicted = sum(size for part, size in parts.items() if part not in ("libraries", "reserve"))
    bare = plan_from_layout(plan.layout)
    save_plan(bare, tmp_path / "plan.json")
    argv = (*job, *TRAINING, f"--data-cache-path={tmp_path / 'cache'}", "--train-iters=2")

    def train(rank: int) -> None:
        backend.activate_cpu_backend()
        arguments = HeteroArguments(
            None, tmp_path / "plan.json", "layout-independent", (*argv, *backend.CPU_FLAGS)
        )
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
            entry.train_asymmetric(bare, arguments, World.from_environment(), None)
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        held = peak = 0
        for event in events:
            held += event.nbytes()
            peak = max(peak, held)
        (tmp_path / "peak.json").write_text(json.dumps(peak))

    run_jobs([LocalJob("allocated", 1, on_this_backend(train), tmp_path / "allocated")], 300)
    assert json.loads((tmp_path / "peak.json").read_text()) == pytest.approx(predicted, rel=0.02)
