"""Jobs that lose a rank, a file or their disk, with real processes: what was saved is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hetero.runtime.faults.drill import Drill
from megatron_hetero.runtime.faults.progress import Phase
from megatron_hetero.runtime.job.local.jobs import RankFailedError
from megatron_hetero.runtime.state import folders
from tests.runtime.fault_runs import (
    ASYMMETRIC,
    KILLED,
    LAST,
    SYMMETRIC,
    FaultJob,
    drill_of,
    equal_checkpoints,
    killed_and_resumed,
    torn,
)
from tests.runtime.flip_runs import BEFORE, decisions


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FaultJob:
    """The job left alone."""
    job = FaultJob(ASYMMETRIC, tmp_path_factory.mktemp("faults") / "whole", zero=True)
    job.run()
    return job


def copy_of(whole: FaultJob, name: str) -> FaultJob:
    """Another job with the checkpoints of `whole`, which ends two steps later."""
    job = FaultJob(whole.layout, whole.folder.parent / name, whole.zero)
    shutil.copytree(whole.checkpoints, job.checkpoints)
    return job


@pytest.mark.parametrize("phase", [Phase.STEADY, Phase.RENAME], ids=str)
def test_a_killed_job_goes_on_to_the_same_bits(phase: Phase, whole: FaultJob) -> None:
    job = FaultJob(whole.layout, whole.folder.parent / phase, whole.zero)
    step = 5 if phase is Phase.STEADY else 4
    drill = Drill("kill", 1 if phase is Phase.STEADY else 0, step, phase)
    assert killed_and_resumed(job, drill, whole) == []


def test_damaged_files_are_refused_and_the_checkpoint_before_is_loaded(whole: FaultJob) -> None:
    """One bit of one file of the newest; the steps are trained again, to the same bits."""
    job = copy_of(whole, "damaged")
    newest = folders.step_folder(job.checkpoints, LAST)
    path = newest / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    job.run()
    log = job.log()
    assert f"{newest} is refused:" in log and "__1_0.distcp: its bytes changed" in log
    assert f"iter_{LAST - 2:07d} is whole and is loaded instead" in log
    assert torn(job.checkpoints) == []
    assert equal_checkpoints(newest, folders.step_folder(whole.checkpoints, LAST))
    shutil.rmtree(folders.step_folder(job.checkpoints, LAST - 2))
    path.write_bytes(data[:100])
    with pytest.raises(RankFailedError, match="no checkpoint in it can be loaded") as failed:
        job.run()
    assert failed.value.exit_code == 4


def test_a_full_disk_fails_the_save_and_not_the_job(whole: FaultJob) -> None:
    """Twice, in another part of a save each; the last save is good, and so is the job's end."""
    job = FaultJob(whole.layout, whole.folder.parent / "full", whole.zero)
    job.run("--hetero-drill=no-space@2:2:save-data")
    log = job.log()
    assert "iter_0000002 was NOT saved" in log and "No space left on device" in log
    assert folders.complete_steps(job.checkpoints) == [LAST, LAST - 2]
    assert not list(job.checkpoints.glob(".saving-*"))
    assert equal_checkpoints(*(folders.step_folder(one.checkpoints, LAST) for one in (job, whole)))


def test_a_job_whose_last_save_failed_does_not_end_well(whole: FaultJob) -> None:
    job = copy_of(whole, "unsaved")
    with pytest.raises(RankFailedError, match="last checkpoint was not saved") as failed:
        job.run("--train-iters=8", f"--hetero-drill=no-space@0:{LAST + 1}:manifest",
                "--override-opt-param-scheduler")  # fmt: skip
    assert failed.value.exit_code == 4
    assert torn(job.checkpoints) == []


@pytest.mark.slow
def test_torchrun_starts_a_killed_job_again(whole: FaultJob) -> None:
    """The drill is over in the second life, which ends with the same bits."""
    job = FaultJob(whole.layout, whole.folder.parent / "torchrun", whole.zero)
    torchrun = ("torch.distributed.run", "--standalone", "--max-restarts=1")
    done = subprocess.run(
        [
            *(sys.executable, "-m", *torchrun, f"--nproc-per-node={job.num_ranks}"),
            *("-m", "megatron_hetero.pretrain_gpt", *job.arguments()),
            # As in the processes that `whole` forked, where Transformer Engine is hidden.
            "--transformer-impl=local",
            "--hetero-drill=kill@1:5:steady",
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "kill@1:5:steady happens" in done.stdout
    assert re.search(r"error: rank 1 on .* is dead", done.stderr)
    assert equal_checkpoints(*(folders.step_folder(one.checkpoints, LAST) for one in (job, whole)))


@pytest.mark.slow
@pytest.mark.parametrize("phase", KILLED, ids=str)
@pytest.mark.parametrize("layout", [ASYMMETRIC, SYMMETRIC])
def test_a_rank_is_killed_in_every_phase(layout: str, phase: Phase, tmp_path: Path) -> None:
    left_alone = FaultJob(layout, tmp_path / "whole")
    left_alone.run()
    job = FaultJob(layout, tmp_path / "killed")
    drill = drill_of(phase, job.num_ranks, seed=0)
    assert killed_and_resumed(job, drill, left_alone) == []


def test_no_damaged_checkpoint_is_loaded(whole: FaultJob) -> None:
    """By the function that a job asks; `tests.runtime.flip_runs` makes 500, and starts jobs."""
    job = copy_of(whole, "flips")
    files = len(list(folders.step_folder(job.checkpoints, LAST).iterdir()))
    found = decisions(job.checkpoints, 4 * files, job.folder / "work")
    assert len({decision.damage.file for decision in found}) == files
    assert {decision.step for decision in found} == {BEFORE}
