"""Options of Slurm: containers, the queue, and shared machines."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.job import LaunchJob
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.flags.launchers.slurm import slurm_options
from tests.flags.launch_jobs import files, mixed_plan


def test_slurm_runs_in_a_container_and_goes_back_into_the_queue() -> None:
    options = slurm_options([], [], None, None, None, requeue=True, mounts="/data:/data,/home")
    made = {f.name: f.text for f in files("slurm", image="nvcr.io#nvidia/x:1", slurm=options)}
    said = made["job.sbatch"]
    assert said.count("#SBATCH --requeue\n") == 2  # of each component
    assert "--container-image='nvcr.io#nvidia/x:1' --container-mounts=" in said
    assert '--container-mounts="$SLURM_SUBMIT_DIR",/data:/data,/home ' in said
    assert "--container" not in {f.name: f.text for f in files("slurm", image=None)}["job.sbatch"]
    with pytest.raises(UsageError, match="--container-mounts '/a b'"):
        slurm_options([], [], None, None, None, mounts="/a b")


def test_slurm_takes_the_gpus_that_other_jobs_leave(tmp_path: Path) -> None:
    options = slurm_options([], ["16"], None, None, None, shares_nodes=True, memory=["400G"])
    made = {f.name: f.text for f in files("slurm", image=None, slurm=options)}
    assert "--exclusive" not in made["job.sbatch"]
    assert made["job.sbatch"].count("#SBATCH --mem=400G\n") == 2
    # Slurm counts whole machines or its own cards: the plan's third GPU is its third.
    plan = mixed_plan()
    first = plan.hosts[0]
    head, _, rest = made["train.sh"].partition(f"0)  # {first.node}")
    start = head[head.index("IFS=,") :].partition("if [")[0]
    line = next(line.strip() for line in rest.splitlines() if "CUDA_VISIBLE_DEVICES=" in line)
    for given in ("4,5,6,7", "0,1,2,3"):
        done = subprocess.run(
            ["bash", "-c", f"set -eu\n{start}\n{line}\necho $CUDA_VISIBLE_DEVICES"],
            env={"CUDA_VISIBLE_DEVICES": given}, capture_output=True, text=True,
        )  # fmt: skip
        wanted = [given.split(",")[i] for i in first.gpu_indices]
        assert done.stdout.strip() == ",".join(wanted), done.stderr
    done = subprocess.run(
        ["bash", "-c", f"set -eu\n{start}\n{line}"], env={}, capture_output=True, text=True
    )
    assert done.returncode != 0 and "fewer GPUs than planned" in done.stderr


def test_slurm_of_unlike_cards_is_not_shared() -> None:
    plan = mixed_plan()
    first = plan.hosts[0]
    unlike = replace(first, gpu_types=("A100-80GB",) * (len(first.gpu_indices) - 1) + ("T4",))
    given = {"partition": [], "cpus_per_task": [], "account": None, "qos": None, "time": None,
             "requeue": False, "container_mounts": None, "share_nodes": True,
             "mem": []}  # fmt: skip
    read = LAUNCHERS["slurm"].read_options
    assert read is not None
    with pytest.raises(UsageError, match="has unlike GPUs"):
        read(LaunchJob(replace(plan, hosts=(unlike, *plan.hosts[1:]))), given)
    (note,) = read(LaunchJob(plan), given).notes
    assert "give --cpus-per-task" in note
