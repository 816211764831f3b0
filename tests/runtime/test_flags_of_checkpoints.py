"""Flags of checkpoints change a resumed job on a plan as they do in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_effects import EXPERTS
from tests.runtime.flag_runs import one_process_job, plan_job, read_log

ODD = "tp2:2,tp1:2 @6"
FINE_TUNED = ("--finetune", "--untie-embeddings-and-output-weights")


@pytest.mark.parametrize(
    "strictness", [pytest.param("log_unexpected", marks=pytest.mark.slow), "log_all"]
)
def test_weights_that_a_checkpoint_lacks_begin_anew_and_are_named(
    strictness: str, tmp_path: Path
) -> None:
    """Norms of queries and keys are new in the resumed job; by default its load fails."""
    makers = (plan_job, one_process_job)
    first = [
        make(
            tmp_path / f"first-{make.__name__}",
            ["--save", str(tmp_path / make.__name__), "--save-interval=1000"],
        )
        for make in makers
    ]
    run_jobs(first, 240)
    resumed = [
        make(
            tmp_path / f"then-{make.__name__}",
            [
                *("--load", str(tmp_path / make.__name__), "--qk-layernorm", "--train-iters=6"),
                *("--no-load-optim", f"--dist-ckpt-strictness={strictness}"),
            ],
        )
        for make in makers
    ]
    run_jobs(resumed, 240)
    ours, one = map(read_log, resumed)
    assert len(ours.losses) == 3
    assert ours.losses == pytest.approx(one.losses, rel=2e-6)
    for job in resumed:
        assert "q_layernorm" in (job.directory / "rank-0.log").read_text()


def test_a_checkpoint_is_evaluated_on_the_first_validation_samples(tmp_path: Path) -> None:
    """`--skip-train --load`: the job that saved had read one batch of validation, which Megatron
    reads again.  A learning rate of 0 keeps all weights alike."""
    makers = (plan_job, one_process_job)
    flags = ["--lr=0", "--eval-iters=1", "--split=8,1,1", "--save-interval=1000"]
    first = [
        make(
            tmp_path / f"first-{make.__name__}",
            [*flags, "--eval-interval=2", f"--save={tmp_path / make.__name__}"],
        )
        for make in makers
    ]
    run_jobs(first, 240)
    resumed = [
        make(
            tmp_path / f"then-{make.__name__}",
            [*flags, "--skip-train", f"--load={tmp_path / make.__name__}"],
        )
        for make in makers
    ]
    run_jobs(resumed, 240)
    # Validation in the middle of training, at its end, and the test samples.
    trained, _ = (read_log(job).numbers(r"lm loss value: (\S+) ") for job in first)
    ours, one = (read_log(job).numbers(r"lm loss value: (\S+) ") for job in resumed)
    assert len(trained) == 3 and len(ours) == 2
    assert ours == pytest.approx(one, rel=2e-6)
    assert ours == pytest.approx([trained[0], trained[2]], rel=2e-6)
    assert trained[0] != pytest.approx(trained[1], rel=1e-4)


@pytest.mark.slow
def test_the_instances_of_a_divided_optimizer_change_nothing(tmp_path: Path) -> None:
    """Stock divides its state over fewer ranks with them; what is trained stays."""
    flags = ["--use-distributed-optimizer"]
    jobs = [
        plan_job(tmp_path / "one", flags),
        plan_job(tmp_path / "two", [*flags, "--num-distributed-optimizer-instances=2"]),
    ]
    run_jobs(jobs, 240)
    alone, told = map(read_log, jobs)
    assert len(alone.losses) == 3 and told.losses == alone.losses
    assert "has no effect on an asymmetric plan" in (jobs[1].directory / "rank-0.log").read_text()


@pytest.mark.parametrize(
    "other",
    ["tp1:1,tp1:3 @6", pytest.param(None, marks=pytest.mark.slow)],
    ids=["a stock plan", "one process"],
)
def test_whoever_loses_the_odd_card_goes_on_in_stock_megatron(
    other: str | None, tmp_path: Path
) -> None:
    """Saved on an asymmetric plan with a divided optimizer and no further flag: the losses go on as
    on that plan, and otherwise where the moments are left behind."""
    flags = ["--use-distributed-optimizer", "--override-opt_param-scheduler", "--train-iters=4"]
    saved = f"{tmp_path / 'saved'}"
    saving = [f"--save={saved}", "--save-interval=2", "--exit-interval=2"]
    run_jobs([plan_job(tmp_path / "saving", [*flags, *saving], ODD)], 240)
    going = [*flags, f"--load={saved}"]

    def resumed(name: str, *more: str) -> LocalJob:
        # The vocabulary is padded as under the plan that saved.
        if other is None:
            return one_process_job(tmp_path / name, [*going, *more], ODD)
        argv = [*going, *more, "--make-vocab-size-divisible-by=8"]
        return plan_job(tmp_path / name, argv, other)

    jobs = [
        plan_job(tmp_path / "odd", going, ODD),
        resumed("then"),
        resumed("without", "--no-load-optim"),
    ]
    run_jobs(jobs, 240)
    odd, then, without = (read_log(job).losses for job in jobs)
    assert len(then) == 2
    assert then == pytest.approx(odd, rel=2e-6)
    assert abs(without[1] / odd[1] - 1) > 1e-5


@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(FINE_TUNED, marks=pytest.mark.slow),
        pytest.param(EXPERTS, marks=pytest.mark.slow),
    ],
    ids=["resumed", "fine-tuned", "experts"],
)
def test_weights_that_nobody_draws_are_all_those_of_the_checkpoint(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    """What nobody drew is NaN here, so that a weight left out of the checkpoint would show."""
    saved = tmp_path / "saved"
    saving = [*more, f"--save={saved}", "--save-interval=1000"]
    run_jobs([plan_job(tmp_path / "first", saving, ODD)], 240)
    last = 3 if "--finetune" in more else 6
    flags = [*more, f"--load={saved}", f"--train-iters={last}", "--no-load-optim"]
    undrawn = [*flags, "--no-initialization"]
    jobs = [
        _with_nan_in_new_memory(plan_job(tmp_path / "plan", undrawn)),
        one_process_job(tmp_path / "one", undrawn),
        plan_job(tmp_path / "drawn", flags),
    ]
    run_jobs(jobs, 240)
    ours, one, drawn = (read_log(job).losses for job in jobs)
    assert len(ours) == 3
    assert ours == drawn
    assert ours == pytest.approx(one, rel=2e-6)


def _with_nan_in_new_memory(job: LocalJob) -> LocalJob:
    def train(rank: int) -> None:
        # torch fills what it hands out, then, and warns of what no order of sums makes equal.
        torch.use_deterministic_algorithms(True, warn_only=True)
        job.function(rank)

    return replace(job, function=train)
