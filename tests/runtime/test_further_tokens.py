"""Multi-token prediction on the last stage of unlike replicas: losses, gradients, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.run import outcome_to_data, records, verify
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.workloads import DEEPSEEK_LIKE, LLAMA_LIKE, plan, workload

pytestmark = pytest.mark.slow
TIED: dict[str, Any] = {"position_embedding": "rope", "use_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tp2:3,tp1:1 @4 | tp1:4 @2", TIED),
        ("tp1:1,tp3(2:1:1):3 @4 | tp1:4 @2", {**LLAMA_LIKE, "mtp_num_layers": 2}),
        ("tp1:1,tp2:3 @4 | tp2:4 @2", DEEPSEEK_LIKE),
    ],
    ids=["tied", "uneven", "experts"],
)
def test_a_plan_trains_as_one_process(layout: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Of Megatron's own start, which the checkpoint of one process is."""
    job = workload(**{"mtp_num_layers": 1, **changes})
    outcome = verify(plan(layout), job, Options(optimizers=("sgd",), steps=2), tmp_path)
    assert outcome.ok, outcome_to_data(outcome)


def test_a_checkpoint_goes_on_under_another_plan(tmp_path: Path) -> None:
    job = workload(**TIED, mtp_num_layers=1)
    first = shrink(plan("tp3(2:1:1):3,tp1:1 @4 | tp1:4 @2"), job)
    second = shrink(plan("tp1:2,tp3(2:1:1):2 @6"), job)
    assert first.model == second.model
    jobs = VerifyJobs(first, Options(steps=4, optimizers=("adam",)), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    before, after = jobs.interrupted_jobs("adam", second, 2)
    run_jobs([before, jobs.reference_job("adam")], 120)
    run_jobs([after], 120)
    (one,) = records(jobs.reference_job("adam"))
    for job_, steps in ((before, (1, 2)), (after, (3, 4))):
        for record in records(job_):
            for step in steps:
                if step in record.losses:
                    assert record.losses[step] == pytest.approx(one.losses[step], rel=3e-6)
