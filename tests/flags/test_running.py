"""Jobs that were launched: which commands ask after them, and what is refused.

The launchers' tools are stand-ins on the PATH that write down how they were called.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.errors import FileFormatError, HeteroError, UnsupportedError, UsageError
from megatron_hetero.files import write_json
from megatron_hetero.flags.launchers.launcher import ACTIONS
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.flags.launchers.running import RECORD_NAME, commands_of, record_of
from megatron_hetero.plan.file import save_plan
from tests.flags.launch_jobs import files, job, mixed_plan, run_script, written

TOOLS = (
    "sbatch", "squeue", "sacct", "scancel", "qstat", "qdel", "kubectl", "sky", "ssh", "pkill",
)  # fmt: skip
JOB_IDS = {"slurm": "4711;big", "pbs": "4711.head"}
LABEL = "jobset.sigs.k8s.io/jobset-name=megatron-hetero"


def launched(folder: Path, launcher: str) -> Path:
    """A folder as `launch` leaves it, and as `start.sh` does."""
    folder.mkdir()
    write_json(folder / RECORD_NAME, record_of(job(), launcher))
    # The number of the job, as the launcher's own tool prints it.
    if launcher in JOB_IDS:
        (folder / "job.id").write_text(f"{JOB_IDS[launcher]}\n")
    (folder / "start.pid").write_text("4712\n")
    return folder


def tools(folder: Path, monkeypatch: pytest.MonkeyPatch, **codes: int) -> Path:
    """Stand-ins that add their words to a file, and end with the code that is given for them."""
    (folder / "bin").mkdir(exist_ok=True)
    calls = folder / "calls"
    for name in TOOLS:
        program = folder / "bin" / name
        program.write_text(
            f'#!/bin/sh\nprintf "%s " {name} "$@" >>"{calls}"\necho >>"{calls}"\n'
            f"exit {codes.get(name, 0)}\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return calls


@pytest.mark.parametrize(
    ("launcher", "action", "commands"),
    [
        ("slurm", "status", ["squeue --jobs 4711 ", "sacct --jobs 4711 --format=JobID,JobName,St"]),
        ("slurm", "stop", ["scancel 4711 "]),
        ("pbs", "status", ["qstat -x 4711.head "]),
        ("pbs", "stop", ["qdel 4711.head "]),
        ("kubernetes", "status", ["kubectl get jobset megatron-hetero ", "kubectl get pods --sel"]),
        ("kubernetes", "logs", [f"kubectl logs --selector {LABEL} --prefix --tail 200 --max-l"]),
        ("kubernetes", "stop", ["kubectl delete --filename jobset.yaml "]),
        ("pytorchjob", "status", ["kubectl get pytorchjob megatron-hetero ", "kubectl get pods"]),
        ("pytorchjob", "logs", ["kubectl logs --selector training.kubeflow.org/job-name=meg"]),
        ("pytorchjob", "stop", ["kubectl delete --filename pytorchjob.yaml "]),
        ("skypilot", "status", ["sky status megatron-hetero-0 megatron-hetero-1 ", "sky queue "]),
        (
            "skypilot",
            "logs",
            ["sky logs --no-follow megatron-hetero-0 ", "sky logs --no-follow megatron-hetero-1 "],
        ),
        (
            "skypilot",
            "stop",
            ["sky cancel --yes --all megatron-hetero-0 ", "sky cancel --yes --all megatron-hetero"],
        ),
        (
            "ssh",
            "status",
            ["ssh -o BatchMode=yes a.example pgrep -a torchrun ", "ssh -o BatchMode=yes b.example"],
        ),
        ("ssh", "stop", ["pkill -TERM -F start.pid -f start[.]sh "]),
    ],
)
def test_the_launchers_own_tools_are_asked(
    launcher: str, action: str, commands: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    folder = launched(tmp_path / "job", launcher)
    calls = tools(tmp_path, monkeypatch)
    assert main(["launch", f"--{action}", str(folder), "--dry-run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert not calls.exists()
    assert main(["launch", f"--{action}", str(folder)]) == 0
    called = calls.read_text().splitlines()
    assert len(called) == len(commands) == len(shown)
    for line, start in zip(called, commands, strict=True):
        assert line.startswith(start)
    assert [line.split()[0] for line in shown] == [line.split()[0] for line in called]


@pytest.mark.parametrize(
    ("launcher", "name"), [("slurm", "job.log"), ("pbs", "job.log"), ("ssh", "logs/node-1.log")]
)
def test_logs_are_read_where_they_are_written(
    launcher: str, name: str, tmp_path: Path, capfd
) -> None:
    folder = launched(tmp_path / "job", launcher)
    (folder / "logs").mkdir()
    for log in ("logs/node-0.log", "logs/node-1.log", "job.log"):
        (folder / log).write_text(f"last words of {log}\n")
    assert main(["launch", "--logs", str(folder)]) == 0
    assert f"last words of {name}" in capfd.readouterr().out


def test_a_job_that_is_over_is_found_by_the_other_command(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    folder = launched(tmp_path / "job", "slurm")
    tools(tmp_path, monkeypatch, squeue=1)
    assert main(["launch", "--status", str(folder)]) == 0
    tools(tmp_path, monkeypatch, squeue=1, sacct=1)
    assert main(["launch", "--status", str(folder)]) == 1
    assert "none of its commands found the job" in capsys.readouterr().err
    tools(tmp_path, monkeypatch, scancel=1)
    assert main(["launch", "--stop", str(folder)]) == 1
    assert "scancel 4711 ended with exit code 1" in capsys.readouterr().err


def test_a_tool_that_is_not_there_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = launched(tmp_path / "job", "kubernetes")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "--status", str(folder)]) == 5
    assert "there is no kubectl here" in capsys.readouterr().err


def test_a_site_without_accounting_still_has_its_queue(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = launched(tmp_path / "job", "slurm")
    tools(tmp_path, monkeypatch)
    (tmp_path / "bin/sacct").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main(["launch", "--status", str(folder)]) == 0
    assert "there is no sacct here" in capsys.readouterr().err


@pytest.mark.parametrize("action", ACTIONS)
def test_jobs_started_by_hand_are_refused(action: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="started by hand"):
        commands_of(launched(tmp_path / "job", "torchrun"), action)


@pytest.mark.parametrize(
    ("name", "text", "error", "words"),
    [
        ("job.id", "4711; rm -rf /", UsageError, "is no number of a job or process"),
        ("job.id", None, UsageError, "was the job started by"),
        (RECORD_NAME, None, FileFormatError, "name a folder that `launch` wrote"),
        (RECORD_NAME, '{"launcher": "at"}', FileFormatError, "hosts"),
        (
            RECORD_NAME,
            '{"launcher": "at", "name": "a", "hosts": [], "num_parts": 1}',
            FileFormatError,
            "launcher 'at' is not known; known are torchrun, ssh",
        ),
        (
            RECORD_NAME,
            '{"launcher": "slurm", "name": "a b", "hosts": [], "num_parts": 1}',
            FileFormatError,
            "not one that `launch` writes",
        ),
        (
            RECORD_NAME,
            '{"launcher": "ssh", "name": "a", "hosts": ["-oProxyCommand=x"], "num_parts": 1}',
            FileFormatError,
            "not one that `launch` writes",
        ),
    ],
)
def test_what_is_in_the_folder_never_becomes_a_command(
    name: str, text: str | None, error: type[HeteroError], words: str, tmp_path: Path
) -> None:
    folder = launched(tmp_path / "job", "slurm")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(error, match=words):
        commands_of(folder, "stop")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "PLAN.JSON, --for, -o FOLDER missing"),
        (["--status", "job", "--for", "ssh"], "--status job stands alone"),
        (["plan.json", "--for", "ssh", "-o", "job", "--dry-run"], "--dry-run goes with --status"),
        (["PLAN", "--for", "ssh", "-o", "job", "--time", "10"], "--for ssh does not read it"),
        (["PLAN", "--for", "ssh", "-o", "job", "--open-ports"], "it goes with --for skypilot"),
        # It was ignored.
        (["PLAN", "--for", "ssh", "-o", "job", "--image", "x"], "--for ssh starts no container"),
        (["PLAN", "--for", "torchrun", "-o", "job", "--image", "x"], "goes with --for slurm or"),
        (["PLAN", "--for", "slurm", "-o", "job", "--wheel", "x.whl"], "there is no such wheel"),
        (
            ["PLAN", "--for", "slurm", "-o", "job", "--wheel", "http://a.example/x.whl"],
            "an https URL",
        ),
    ],
)
def test_arguments_that_do_not_go_together(
    words: list[str], message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(mixed_plan(), tmp_path / "plan.json")
    assert main(["launch", *("plan.json" if word == "PLAN" else word for word in words)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "job").exists()


def test_a_slurm_job_is_submitted_asked_after_and_stopped(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    save_plan(mixed_plan(), tmp_path / "plan.json")
    folder = tmp_path / "job"
    words = ["launch", str(tmp_path / "plan.json"), "--for", "slurm", "-o", str(folder)]
    assert main([*words, "--partition", "RTX-4090=rtx", "--partition", "gpu"]) == 0
    calls = tools(tmp_path, monkeypatch)
    (tmp_path / "bin/sbatch").write_text(f'#!/bin/sh\necho sbatch "$@" >>"{calls}"\necho 99\n')
    subprocess.run(["bash", str(folder / "start.sh")], check=True, cwd=tmp_path)
    assert main(["launch", "--stop", str(folder)]) == 0
    assert calls.read_text().split() == ["sbatch", "--parsable", "job.sbatch", "scancel", "99"]
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\nexit 1\n")
    assert subprocess.run(["bash", str(folder / "start.sh")]).returncode == 1
    # A refused submission leaves the number of the job that runs.
    assert (folder / "job.id").read_text() == "99\n"


def test_ssh_stop_ends_what_start_began(tmp_path: Path) -> None:
    folder = written(tmp_path, files("ssh"), "echo started; exec sleep 60")
    write_json(folder / RECORD_NAME, record_of(job(), "ssh"))
    environment = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", str(folder / "start.sh")], env=environment)
    try:
        logs = [folder / "logs" / f"node-{rank}.log" for rank in (0, 1)]
        deadline = time.monotonic() + 30
        while not all(log.exists() and "started" in log.read_text() for log in logs):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert main(["launch", "--stop", str(folder)]) == 0
        assert process.wait(timeout=30) == 130
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(UsageError, match="was the job started by"):
        commands_of(folder, "stop")


def test_rented_machines_start_once_all_are_there(tmp_path: Path) -> None:
    folder = written(tmp_path, files("skypilot"), "true")
    calls = folder / "calls"
    sky = f'#!/bin/sh\necho "$@ " >>"{calls}"\n'
    (folder / "bin/sky").write_text(sky)
    (folder / "bin/sky").chmod(0o755)
    (folder / "bin/ssh").write_text("#!/bin/sh\necho 10.1.2.3 172.17.0.1\n")
    done = run_script(folder, "start.sh")
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().splitlines()
    assert sorted(lines[:2]) == [
        f"launch --yes -c megatron-hetero-{part} part-{part}.yaml " for part in (0, 1)
    ]
    # The private address: the public one of `sky status --ip` is behind SkyPilot's firewall.
    assert lines[2:4] == [
        f"exec --detach-run --env MASTER_ADDR=10.1.2.3 megatron-hetero-{part} part-{part}.yaml "
        for part in (0, 1)
    ]
    (folder / "bin/sky").write_text(sky + 'case "$*" in *part-1*) exit 1;; esac\n')
    calls.unlink()
    done = run_script(folder, "start.sh")
    assert done.returncode == 1
    assert "sky down megatron-hetero-0 megatron-hetero-1" in done.stderr
    assert "exec" not in calls.read_text()


def test_the_record_is_data_that_reads_back(tmp_path: Path) -> None:
    for launcher in LAUNCHERS:
        record = record_of(job(), launcher)
        assert json.loads(json.dumps(record)) == record
