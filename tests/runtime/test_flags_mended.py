"""Flags that once did nothing or harm on a plan: each shows its effect as in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_runs import one_process_job, plan_and_one, plan_job

EXPERTS = (
    "--num-experts=4", "--moe-router-topk=2", "--sequence-parallel", "--disable-bias-linear",
)  # fmt: skip


def test_a_job_that_only_evaluates(tmp_path: Path) -> None:
    """`--skip-train`: no optimizer, no gradients, the validation and test losses of the weights."""
    ours, one = plan_and_one(tmp_path, ["--skip-train", "--eval-iters=2"])
    pattern = r"lm loss value: (\S+) "
    assert len(ours.numbers(pattern)) == 2
    assert ours.numbers(pattern) == pytest.approx(one.numbers(pattern), rel=2e-6)
    assert ours.losses == []


def test_experts_exchange_tokens_all_to_all(tmp_path: Path) -> None:
    """`--moe-token-dispatcher-type alltoall`, Megatron's streams and events bridged on a CPU."""
    flags = [*EXPERTS, "--moe-token-dispatcher-type=alltoall"]
    ours, one = plan_and_one(tmp_path, flags)
    assert len(ours.losses) == 3
    assert ours.losses == pytest.approx(one.losses, rel=2e-6)
    assert ours.norms == pytest.approx(one.norms, rel=2e-3)


@pytest.mark.slow
def test_a_spiky_loss_is_found_as_in_one_process(tmp_path: Path) -> None:
    """Megatron takes the largest loss of a hundred micro-batches from step 2 on; the second update
    (the first has a learning rate of 0) makes step 3 more than ten times as bad on each replica.
    Megatron runs the step again and goes on."""
    flags = [
        "--check-for-spiky-loss", "--optimizer=sgd", "--lr=1e5", "--clip-grad=0",
        "--lr-warmup-iters=1", "--global-batch-size=202", "--num-layers=2",
    ]  # fmt: skip
    jobs = [
        make(tmp_path / make.__name__, flags, "tp1:1,tp1:1 @101 | tp1:2 @101")
        for make in (plan_job, one_process_job)
    ]
    run_jobs(jobs, 120)
    for job, last_stages in zip(jobs, ((1, 2), (0,)), strict=True):
        for rank in last_stages:
            log = (job.directory / f"rank-{rank}.log").read_text()
            # Megatron counts from one more.
            assert re.findall(r"at iteration #(\d) .*Spiky loss", log) == ["4"], (job.name, rank)
        assert "Need to rerun step" in (job.directory / "rank-0.log").read_text()


@pytest.mark.slow
def test_profiler_traces_lie_beside_the_folder_of_tensorboard(tmp_path: Path) -> None:
    """Every rank that is asked writes a trace, in the folder that the job names; and the log has
    the user's flags that a CPU changes."""
    flags = [
        "--profile", "--use-pytorch-profiler", "--profile-step-start=1", "--profile-step-end=2",
        "--profile-ranks", "0", "3", f"--tensorboard-dir={tmp_path / 'logs' / 'board'}",
        "--transformer-impl=transformer_engine", "--distributed-backend=nccl",
    ]  # fmt: skip
    job = plan_job(tmp_path / "plan", flags)
    run_jobs([job], 120)
    traces = tmp_path / "logs" / "torch_profile"
    assert sorted(path.name for path in traces.iterdir()) == ["rank-0.json.gz", "rank-3.json.gz"]
    first = (job.directory / "rank-0.log").read_text()
    assert first.startswith("> layers: Megatron's local ones (no Transformer Engine on this CPU: ")
    assert "> no GPU: --transformer-impl transformer_engine becomes local" in first
    assert "> no GPU: --distributed-backend nccl becomes gloo" in first
