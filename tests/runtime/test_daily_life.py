"""A run as users see it: one log for the whole job, validation, the same start, torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.lab.verify.small.text import write_text_dataset
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.workloads import plan, workload

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> VerifyJobs:
    shrunk = shrink(plan(LAYOUT), workload(per_token_loss=True))
    made = VerifyJobs(shrunk, Options(steps=2), tmp_path_factory.mktemp("jobs"))
    run_jobs([made.seed_job()], 120)
    return made


def run(folder: Path, num_ranks: int, argv: Sequence[str], stock: bool = False) -> list[str]:
    """Train and return the lines of the last rank's log."""
    common = [*argv, f"--data-cache-path={folder / 'cache'}"]

    def train(rank: int) -> None:
        if stock:
            backend.activate_cpu_backend()
            entry.train_stock([*common, *backend.CPU_FLAGS], entry.World.from_environment())
        else:
            entry.main(common)

    run_jobs([LocalJob(folder.name, num_ranks, train, folder)], 120)
    return (folder / f"rank-{num_ranks - 1}.log").read_text().splitlines()


def number(lines: Sequence[str], pattern: str) -> list[float]:
    return [float(m[1].replace(",", "")) for line in lines for m in re.finditer(pattern, line)]


@pytest.mark.parametrize(
    ("data", "num_losses"),
    [([], 4), (["--dataloader-type=cyclic"], 4), (["--full-validation"], 6)],
    ids=["in order", "shuffled", "whole validation sets"],
)
def test_the_log_and_the_validation_are_the_whole_jobs(
    data: list[str], num_losses: int, jobs: VerifyJobs, tmp_path: Path
) -> None:
    training = [
        a
        for a in jobs.training_arguments("adam")
        if not a.startswith(("--eval-", "--split", "--train-iters"))
    ]
    argv = [*training, "--split=8,1,1", "--eval-iters=2", "--eval-interval=2", "--train-iters=4"]
    argv += [*data, "--log-params-norm"]
    if "--full-validation" in data:
        text = next(a for a in argv if a.startswith("--data-path=")).partition("=")[2]
        argv = [a for a in argv if not a.startswith(("--data-path", "--split"))]
        argv += [f"--train-data-path={text}"]
        # A global batch, and no whole number of them.  Stock Megatron takes as many batches of a
        # set as it has samples.
        sets = (_short_text(tmp_path / f"of-{n}", n) for n in (6, 7))
        argv += ["--multiple-validation-sets", "--valid-data-path", *sets]
    multiple = f"--make-vocab-size-divisible-by={jobs.shrunk.vocab_multiple}"
    one = run(tmp_path / "one", 1, [*argv, multiple], stock=True)
    ours = run(tmp_path / "ours", 4, [*argv, f"--hetero-layout={LAYOUT}"])
    for pattern, count in (
        (r"lm loss: (\S+) ", 4),
        (r"grad norm: (\S+) ", 4),
        (r"consumed samples: +(\d+)", 4),
        (r"global batch size: +(\d+)", 4),
        (r"learning rate: (\S+) ", 4),
        (r"lm loss value: (\S+) ", num_losses),
        (r"params norm: (\S+) ", 4),
    ):
        assert len(number(ours, pattern)) == count, pattern
        assert number(ours, pattern) == pytest.approx(number(one, pattern), rel=2e-6), pattern
    assert number(ours, r"consumed samples: +(\d+)") == [6, 12, 18, 24]
    assert all(rate > 0 for rate in number(ours, r"tokens per second: ([\d,.]+)"))
    assert len(number(ours, r"tokens per second: ([\d,.]+)")) == 4


def _short_text(path: Path, num_samples: int) -> str:
    """Write a validation set of so many samples and return its path."""
    write_text_dataset(path, num_samples * 49)
    return str(path)


def test_zeros_in_the_gradient_are_counted_once(tmp_path: Path) -> None:
    """Rows of the vocabulary that no sample has, on two replicas and on shards of unlike width.

    Without biases no gradient is zero but for rounding.
    """
    shrunk = shrink(
        plan(LAYOUT), workload(per_token_loss=True, tied_embeddings=False, add_bias_linear=False)
    )
    made = VerifyJobs(shrunk, Options(steps=2), tmp_path)
    run_jobs([made.seed_job()], 120)
    argv = [*made.training_arguments("sgd"), "--log-num-zeros-in-grad"]
    multiple = f"--make-vocab-size-divisible-by={shrunk.vocab_multiple}"
    one = number(run(tmp_path / "one", 1, [*argv, multiple], stock=True), r"num zeros: (\S+) ")
    ours = run(tmp_path / "ours", 4, [*argv, f"--hetero-layout={LAYOUT}"])
    assert one == number(ours, r"num zeros: (\S+) ")
    assert all(count > 1000 for count in one)


def test_initial_weights_do_not_depend_on_the_layout(jobs: VerifyJobs, tmp_path: Path) -> None:
    fresh = [
        a
        for a in jobs.training_arguments("sgd")
        if not a.startswith(("--load", "--finetune", "--no-load", "--exit-on", "--make-vocab"))
    ]
    losses = []
    for name, layout in (("a", LAYOUT), ("b", "tp1:1,tp2:3 @6"), ("stock", "tp2:2,tp2:2 @6")):
        num_ranks = plan(layout).layout.num_devices
        argv = [*fresh, "--make-vocab-size-divisible-by=8", f"--hetero-layout={layout}"]
        losses.append(number(run(tmp_path / name, num_ranks, argv), r"lm loss: (\S+) "))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


def test_a_missing_checkpoint_is_a_failure(jobs: VerifyJobs, tmp_path: Path) -> None:
    """Megatron leaves with status 0, having trained nothing."""
    argv = [a for a in jobs.training_arguments("sgd") if not a.startswith("--load")]
    argv += [f"--load={tmp_path / 'nowhere'}"]
    with pytest.raises(RankFailedError, match=r"status 4(.|\n)*nowhere: there is no checkpoint"):
        run(tmp_path / "ours", 4, [*argv, f"--hetero-layout={LAYOUT}"])


def test_the_wheel_is_not_asked_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own function would run `make` in the wheel's folder and end the process."""
    from megatron.core.datasets import utils

    from megatron_hetero.runtime.megatron import compile_helpers

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(AssertionError, match="something was run"):
        compile_helpers.REPLACEMENT.original()()
    compile_helpers.apply()
    try:
        utils.compile_helpers()
    finally:
        compile_helpers.REPLACEMENT.revert()


@pytest.mark.slow
def test_torchrun_starts_it_as_users_do(jobs: VerifyJobs, tmp_path: Path) -> None:
    argv = [*jobs.training_arguments("sgd"), f"--hetero-layout={LAYOUT}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, "-m", "megatron_hetero.pretrain_gpt", *argv],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(number(done.stdout.splitlines(), r"lm loss: (\S+) ")) == 2
