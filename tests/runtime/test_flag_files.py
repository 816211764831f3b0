"""Flags of checkpoints and data: a plan writes and reads what one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.lab.verify.small.text import write_text_dataset
from megatron_hetero.runtime.job.local.jobs import RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_runs import Log, one_process_job, plan_and_one, plan_job, read_log

LOSS, NORM = 3e-6, 3e-3
"""The log prints seven digits of a loss and three of a norm's decimals."""
TEXT = ("--vocab-size=257", "--train-iters=4", "--eval-iters=2", "--eval-interval=2")
pytestmark = pytest.mark.slow


def equal(ours: Log, one: Log, num_steps: int) -> None:
    assert len(ours.losses) == num_steps
    assert ours.losses == pytest.approx(one.losses, rel=LOSS)
    assert ours.norms == pytest.approx(one.norms, rel=NORM)


def progress(folder: Path) -> list[list[str]]:
    """Return the lines about steps, without times; a thread of its own deletes checkpoints."""
    lines = (folder / "progress.txt").read_text().splitlines()
    fields = ([f for f in line.split("\t")[3:] if "throughput" not in f] for line in lines)
    return sorted(fields)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Log]:
    """Checkpoints of a plan at steps 2 and 4, and its log."""
    folder = tmp_path_factory.mktemp("saved")
    job = plan_job(
        folder, ["--train-iters=4", f"--save={folder / 'save'}", "--save-interval=2", "--swiglu"]
    )
    run_jobs([job], 120)
    return folder / "save", read_log(job)


def test_what_is_kept_of_checkpoints_and_written_beside_them(tmp_path: Path) -> None:
    """`--save-retain-interval`, `--verify-integrity`, `--log-progress`."""
    flags = [
        "--train-iters=5", "--save=save", "--save-interval=1", "--save-retain-interval=2",
        "--verify-integrity", "--log-progress",
    ]  # fmt: skip
    ours, one = plan_and_one(tmp_path, flags)
    equal(ours, one, 5)
    folders = [tmp_path / name / "save" for name in ("plan", "one")]
    kept, kept_by_one = ([path.name for path in sorted(f.iterdir())] for f in folders)
    assert kept == kept_by_one
    steps = [name for name in kept if name.startswith("iter")]
    assert steps == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert progress(folders[0]) == progress(folders[1])
    # A byte of a checkpoint that changed is found before anything is read.
    (data,) = (p for p in (folders[0] / "iter_0000005").glob("__0_0.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    load = plan_job(
        tmp_path / "load",
        [
            *(f"--load={folders[0]}", "--verify-integrity", "--train-iters=6"),
            "--override-opt_param-scheduler",
        ],
    )
    run_jobs([load], 120)
    log = (load.directory / "rank-0.log").read_text()
    assert "iter_0000005 is refused" in log and "__0_0.distcp: its bytes changed" in log
    assert "iter_0000004 is whole and is loaded instead" in log


def test_a_step_of_the_past_is_loaded(saved: tuple[Path, Log], tmp_path: Path) -> None:
    """`--ckpt-step`, in every way that a checkpoint can be read."""
    folder, whole = saved
    flags = [
        "--swiglu", f"--load={folder}", "--ckpt-step=2", "--train-iters=4", "--save=again",
        "--save-interval=4", "--ckpt-fully-parallel-load", "--no-ckpt-fully-parallel-save",
        "--ckpt-assume-constant-structure", "--auto-detect-ckpt-format", "--dist-ckpt-workers=1",
        "--no-ckpt-load-validate-sharding-integrity", "--disable-gloo-process-groups",
    ]  # fmt: skip
    ours, one = plan_and_one(tmp_path, flags)
    equal(ours, one, 2)
    # Megatron's log adds up the losses of the first two steps after a start from a checkpoint.
    assert ours.losses[0] == pytest.approx(whole.losses[2], rel=LOSS)
    assert ours.norms == pytest.approx(whole.norms[2:], rel=NORM)
    further = [*flags[:1], "--load=again", "--train-iters=5", "--override-opt_param-scheduler",
               "--ckpt-fully-parallel-load",
               "--ckpt-fully-parallel-load-process-group=ep_dp",
               "--ckpt-fully-parallel-load-exchange-algo=gather_rounds"]  # fmt: skip
    equal(*plan_and_one(tmp_path, further), 1)


def test_the_data_begin_at_another_step(saved: tuple[Path, Log], tmp_path: Path) -> None:
    """`--override-ckpt-iteration`: the weights of step 2 go on with the samples of step 2."""
    folder, whole = saved
    flags = [
        "--swiglu", f"--load={folder}", "--ckpt-step=2", "--override-ckpt-iteration=1",
        "--train-iters=4",
    ]  # fmt: skip
    ours, one = plan_and_one(tmp_path, flags)
    equal(ours, one, 3)
    assert ours.losses[1] != pytest.approx(whole.losses[2], rel=2 * LOSS)


def test_the_checkpoint_says_rates_and_the_model(saved: tuple[Path, Log], tmp_path: Path) -> None:
    """`--use-checkpoint-opt_param-scheduler`, `--use-checkpoint-args`: neither the schedule of the
    command line nor its MLP is followed."""
    folder, whole = saved
    flags = [
        f"--load={folder}", "--ckpt-step=2", "--lr-decay-style=linear", "--use-checkpoint-args",
        "--use-checkpoint-opt_param-scheduler", "--train-iters=4",
    ]  # fmt: skip
    ours, one = plan_and_one(tmp_path, flags)
    equal(ours, one, 2)
    # Megatron's log adds up the losses of the first two steps after a start from a checkpoint.
    assert ours.losses[0] == pytest.approx(whole.losses[2], rel=LOSS)
    assert ours.norms == pytest.approx(whole.norms[2:], rel=NORM)


@pytest.mark.parametrize(
    ("flags", "num_losses"),
    [
        (["--train-data-path=train", "--valid-data-path=valid", "--test-data-path=test"], 4),
        (["--per-split-data-args-path=sets.json", "--start-eval-at-iter=4"], 3),
        (["--data-args-path=train.txt", "--split=6,2,2"], 4),
    ],
    ids=["paths", "a file of sets, validated late", "a file"],
)
def test_sets_of_their_own_are_read(flags: list[str], num_losses: int, tmp_path: Path) -> None:
    """`--test-data-path`, `--data-args-path`, `--per-split-data-args-path`,
    `--start-eval-at-iter`; the last validation is that of the test set."""
    for name, tokens in (("train", 1000), ("valid", 600), ("test", 800)):
        write_text_dataset(tmp_path / name, tokens)
    sets = {name: [str(tmp_path / name)] for name in ("train", "valid", "test")}
    (tmp_path / "sets.json").write_text(json.dumps(sets))
    (tmp_path / "train.txt").write_text(str(tmp_path / "train"))
    data = [flag.replace("-path=", f"-path={tmp_path}/") for flag in flags]
    ours, one = plan_and_one(tmp_path, TEXT, data=data)
    equal(ours, one, 4)
    pattern = r"lm loss value: (\S+) "
    assert len(ours.numbers(pattern)) == num_losses
    assert ours.numbers(pattern) == pytest.approx(one.numbers(pattern), rel=LOSS)


def test_the_loss_scale_is_the_jobs(tmp_path: Path) -> None:
    """`--loss-scale`, `--min-loss-scale`: the scales and the steps that are skipped."""
    for name, flags in (
        ("constant", ["--loss-scale=64"]),
        ("least", ["--initial-loss-scale=4e12", "--min-loss-scale=1e12", "--hysteresis=1"]),
    ):
        ours, one = plan_and_one(tmp_path / name, ["--fp16", "--train-iters=4", *flags])
        for pattern in (r"loss scale: (\S+) ", r"skipped iterations: +(\d+)"):
            assert len(ours.numbers(pattern)) == 4
            assert ours.numbers(pattern) == one.numbers(pattern), (name, pattern)


def test_a_loss_that_is_no_number_is_trained_on(tmp_path: Path) -> None:
    """`--no-check-for-nan-in-loss-and-grad`."""
    flags = ["--lr=1e30", "--train-iters=4"]
    for make in (plan_job, one_process_job):
        folder = tmp_path / make.__name__
        job = make(folder, [*flags, f"--save={folder}", "--save-interval=4"])
        with pytest.raises(RankFailedError):
            run_jobs([job], 120)
        logs = "".join(path.read_text() for path in job.directory.glob("rank-*.log"))
        assert "found NaN in" in logs
    ours, one = plan_and_one(tmp_path, [*flags, "--no-check-for-nan-in-loss-and-grad"])
    pattern = r"number of nan iterations: +(\d+)"
    assert len(ours.numbers(pattern)) == 4
    assert ours.numbers(pattern) == one.numbers(pattern)
