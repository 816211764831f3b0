"""Ends of a run before its last step: at an interval, after a time, on a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron import training_log
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from tests.runtime.flag_runs import plan_job
from tests.runtime.workloads import plan, workload

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        (["--exit-interval=2"], 2),
        (["--exit-duration-in-mins=1000"], 3),
        (["--exit-signal-handler"], 3),
    ],
    ids=["interval", "duration", "signal"],
)
def test_a_run_saves_and_ends_well(flags: Sequence[str], last: int, tmp_path: Path) -> None:
    """All ranks together, with status 0, whatever replica the reason came from."""
    shrunk = shrink(plan(LAYOUT), workload())
    jobs = VerifyJobs(shrunk, Options(steps=5), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    folder = tmp_path / "checkpoints"
    argv = [
        *jobs.training_arguments("sgd"),
        *flags,
        f"--save={folder}",
        "--save-interval=100",
        f"--hetero-layout={LAYOUT}",
        f"--data-cache-path={tmp_path / 'cache'}",
    ]

    def train(rank: int) -> None:
        from megatron.training import training

        save_without_a_server()

        def observe(iteration: int, loss_dict: dict[str, Any], grad_norm: Any) -> None:
            if iteration != 3 or rank != 3:
                return
            if "--exit-signal-handler" in flags:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                # Megatron counts from its import, which is long ago where many tests run.
                training._TRAIN_START_TIME -= 60 * 1001

        training_log.add_observer(observe)
        entry.main(argv)

    run_jobs([LocalJob("run", 4, train, tmp_path / "run")], 120)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(last)
    log = (tmp_path / "run" / "rank-3.log").read_text()
    assert f"iteration {last:8d}/" in log and f"iteration {last + 1:8d}/" not in log


def test_a_suspect_result_is_judged_by_all_ranks_of_the_same_plan(tmp_path: Path) -> None:
    """Megatron saves before a step whose loss is no number twice, and asks for the job to be
    resumed on other GPUs.  What each rank knows of the step is read by all ranks, or by none."""
    save = tmp_path / "save"
    flags = ["--lr=1e30", "--train-iters=6", f"--save={save}", "--save-interval=100"]

    def log_of_an_end(name: str, layout: str, *more: str) -> str:
        job = plan_job(tmp_path / name, [*flags, *more], layout)
        with pytest.raises(RankFailedError, match="ended with status 16"):
            run_jobs([job], 120)
        return (job.directory / "rank-0.log").read_text()

    asks = "Please resume the job from the checkpoint"
    assert asks in log_of_an_end("first", LAYOUT)
    resumed = log_of_an_end("same", LAYOUT, f"--load={save}")
    assert "Getting RerunStateMachine state from checkpoint" in resumed
    assert "Got rescheduled on the same GPU" in resumed
    other = log_of_an_end("other", "tp1:1,tp2:3 @2 | tp1:4 @4", f"--load={save}")
    assert "Rerun state will be ignored" in other and asks in other
