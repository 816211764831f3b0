"""PBS jobs: which chunks one asks for, and that each chunk starts the part of its own machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.batch import batch_options
from megatron_hetero.flags.launchers.job import LaunchJob
from megatron_hetero.flags.launchers.pbs import PBS, pbs_files, pbs_options, walltime
from tests.flags.launch_jobs import SHOW, job, mixed_plan, run_script, written

# Runs a command as PBS does: in another folder, with a PATH of its own.
TMRSH = 'cd /; echo "$1" >>"$CALLS"; PATH=/usr/bin:/bin; shift; exec "$@"'
NODES = ("a", "b")


def stood_in(folder: Path, torchrun: str, nodes: tuple[str, ...] = NODES) -> dict[str, str]:
    """Write a job's folder with stand-ins for torchrun and for the tools of PBS.

    Returns:
        the variables that PBS gives the job.
    """
    written(folder, pbs_files(job()), torchrun)
    for name, text in (("pbs_tmrsh", TMRSH), ("qsub", 'echo "4711.head"; echo "$@" >&2')):
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "nodes").write_text("".join(f"{node}\n" for node in nodes))
    given = {"PBS_O_WORKDIR": folder, "PBS_NODEFILE": folder / "nodes", "CALLS": folder / "calls"}
    return {name: str(path) for name, path in given.items()}


def test_every_chunk_starts_the_part_of_its_machine(tmp_path: Path) -> None:
    done = run_script(tmp_path, "job.pbs", **stood_in(tmp_path, SHOW))
    log = (tmp_path / "job.log").read_text()
    assert done.returncode == 0, log
    # PBS calls the machines as it does, and their order is that of the ranks.
    assert sorted((tmp_path / "calls").read_text().split()) == ["a", "b"]
    words = log.split("\n")
    ranks = [words[i + 1] for i, word in enumerate(words) if word == "--node-rank"]
    assert sorted(ranks) == ["0", "1"]
    assert "gpus=0,2 p2p=1 Ring" in words


def test_a_failed_node_ends_the_job(tmp_path: Path) -> None:
    """With pbsdsh, which ends with 0 always, this job would end well."""
    given = stood_in(tmp_path, '[ "$4" = 1 ] && exit 3; exec sleep 3')
    assert run_script(tmp_path, "job.pbs", **given).returncode == 1
    assert "a node failed" in (tmp_path / "job.log").read_text()


def test_a_job_with_fewer_machines_than_planned_starts_nothing(tmp_path: Path) -> None:
    given = stood_in(tmp_path, SHOW, nodes=("a",))
    assert run_script(tmp_path, "job.pbs", **given).returncode == 1
    assert "PBS gave 1 machines, and the plan has 2" in (tmp_path / "job.log").read_text()
    assert not (tmp_path / "calls").exists()


def test_start_keeps_the_number_of_the_job(tmp_path: Path) -> None:
    done = run_script(tmp_path, "start.sh", **stood_in(tmp_path, "true"))
    assert done.returncode == 0 and done.stderr == "job.pbs\n"
    assert (tmp_path / "job.id").read_text() == "4711.head\n"


def lines_of(made: LaunchJob) -> list[str]:
    """Return the `#PBS` lines of a job."""
    text = {file.name: file.text for file in pbs_files(made)}["job.pbs"]
    return [line for line in text.splitlines() if line.startswith("#PBS")]


def chunks_of(made: LaunchJob) -> list[list[str]]:
    """Return the resources of each chunk of a job."""
    (line,) = [line for line in lines_of(made) if "select=" in line]
    return [part.split(":")[1:] for part in line.partition("=")[2].split("+")]


def test_chunks_are_the_nodes_of_the_plan_in_order_of_rank() -> None:
    common = batch_options("team", "1-12:00:00", ["A100-80GB=32", "16"], ["RTX-4090=400G"])
    made = job(pbs=pbs_options(common, "gpu"))
    assert {"#PBS -A team", "#PBS -q gpu", "#PBS -l walltime=36:00:00"} < set(lines_of(made))
    assert chunks_of(made) == [
        ["ncpus=32", "mpiprocs=1", "ngpus=4", "host=a.example"],
        ["ncpus=16", "mpiprocs=1", "ngpus=3", "mem=400gb", "host=b.example"],
    ]


@pytest.mark.parametrize(
    ("time", "wanted"),
    [
        ("90", "01:30:00"),
        ("90:30", "01:30:30"),
        ("12:00:00", "12:00:00"),
        ("2-6", "54:00:00"),
        ("2-6:30", "54:30:00"),
        ("10-00:00:01", "240:00:01"),
    ],
)
def test_a_limit_of_time_means_what_it_means_to_slurm(time: str, wanted: str) -> None:
    assert walltime(time) == wanted


def test_values_for_gpus_that_the_plan_leaves_idle_are_notes() -> None:
    assert PBS.read_options is not None
    given = {"account": None, "time": None, "queue": None, "mem": [], "cpus_per_task": []}
    made = PBS.read_options(job(), {**given, "cpus_per_task": ["V100-16GB=8", "16"]})
    assert made.pbs.cpus_per_task == (("", "16"),) and len(made.notes) == 1
    (note,) = PBS.read_options(job(), given).notes
    assert "give --cpus-per-task" in note


@pytest.mark.parametrize(
    ("given", "queue", "words"),
    [
        ((None, None, [], []), "a b", "--queue 'a b'"),
        ((None, "UNLIMITED", [], []), None, "--time UNLIMITED"),
        ((None, None, [], ["0"]), None, "--mem 0"),
        ((None, None, [], ["T4=0G"]), None, "--mem 0"),
        (("$(x)", None, [], []), None, "--account"),
    ],
)
def test_values_that_pbs_could_not_read_are_refused(
    given: tuple[str | None, str | None, list[str], list[str]], queue: str | None, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        pbs_options(batch_options(*given), queue)
    assert words in str(caught.value)


def test_one_machine_is_one_chunk() -> None:
    plan = mixed_plan()
    made = job(plan=replace(plan, hosts=plan.hosts[:1]))
    assert [chunk[-1] for chunk in chunks_of(made)] == ["host=a.example"]
