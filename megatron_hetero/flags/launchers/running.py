"""Status, logs and stop of a launched job, by the tools of its launcher.

`launch` writes `launch.json` into its folder; the commands, as argument vectors, follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from megatron_hetero.errors import FileFormatError, UnsupportedError, UsageError
from megatron_hetero.files import read_json, read_text, validate_document
from megatron_hetero.flags.launchers.job import LaunchJob
from megatron_hetero.flags.launchers.slurm import JOB_ID_NAME, LOG_NAME
from megatron_hetero.flags.launchers.ssh import PID_NAME
from megatron_hetero.plan.checks.devices import is_host_name

RECORD_NAME = "launch.json"
Action = Literal["status", "logs", "stop"]
ACTIONS: tuple[Action, ...] = ("status", "logs", "stop")
_TAIL = "200"
"""Lines of each log."""
_JOB_ID = re.compile(r"([0-9]+)(?:;[\w.-]+)?")
_JOB_NAME = re.compile(r"[a-z][a-z0-9-]*")
_NOT_STARTED = "was the job started by `bash start.sh`?"


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    launcher: Literal["torchrun", "ssh", "slurm", "kubernetes", "skypilot"]
    name: str
    hosts: tuple[str, ...]
    num_parts: int


@dataclass(frozen=True)
class LauncherCommand:
    """A command to run in the job's folder; `may_fail` if the job may be over already."""

    argv: tuple[str, ...]
    may_fail: bool = False


def record_of(job: LaunchJob, launcher: str) -> dict[str, object]:
    """Return the content of `launch.json`."""
    return {
        "launcher": launcher,
        "name": job.name,
        "hosts": [host.host for host in job.plan.hosts],
        "num_parts": len(job.components),
    }


def steps(folder: Path, action: Action) -> tuple[LauncherCommand, ...]:
    """Return the commands that carry out an action on the job of a folder.

    Raises:
        FileFormatError: `launch.json` is missing, or differs from what `launch` writes.
        UsageError: the job was not started, or has ended.
        UnsupportedError: the launcher has no such tool.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        raise FileFormatError(f"{path}: there is none; name a folder that `launch` wrote")
    record = validate_document(read_json(path), _Record, FileFormatError)
    if not _JOB_NAME.fullmatch(record.name) or not all(map(is_host_name, record.hosts)):
        raise FileFormatError(f"{path}:1: a name in it is not one that `launch` writes")
    if record.launcher == "torchrun":
        raise UnsupportedError(
            f"--{action}: with --for torchrun every machine was started by hand and knows no other"
        )
    commands = {"ssh": _ssh, "slurm": _slurm, "kubernetes": _kubernetes, "skypilot": _skypilot}
    return tuple(commands[record.launcher](folder, record, action))


def _ssh(folder: Path, record: _Record, action: Action) -> Iterator[LauncherCommand]:
    if action == "status":
        for host in record.hosts:
            yield LauncherCommand(
                ("ssh", "-o", "BatchMode=yes", host, "pgrep -a torchrun"), may_fail=True
            )
    elif action == "logs":
        names = [f"logs/node-{rank}.log" for rank in range(len(record.hosts))]
        yield LauncherCommand(("tail", "-n", _TAIL, "--", *names))
    else:
        # The process of the file, if it is start.sh still, which then stops what it started.
        _kept(folder / PID_NAME, re.compile("([0-9]+)"))
        yield LauncherCommand(("pkill", "-TERM", "-F", PID_NAME, "-f", "start[.]sh"))


def _slurm(folder: Path, record: _Record, action: Action) -> Iterator[LauncherCommand]:
    if action == "logs":
        yield LauncherCommand(("tail", "-n", _TAIL, "--", LOG_NAME))
        return
    number = _kept(folder / JOB_ID_NAME, _JOB_ID)
    if action == "status":
        yield LauncherCommand(("squeue", "--jobs", number), may_fail=True)
        columns = "JobID,JobName,State,ExitCode,Elapsed,NodeList"
        yield LauncherCommand(("sacct", "--jobs", number, f"--format={columns}"), may_fail=True)
    else:
        yield LauncherCommand(("scancel", number))


def _kubernetes(folder: Path, record: _Record, action: Action) -> Iterator[LauncherCommand]:
    label = f"jobset.sigs.k8s.io/jobset-name={record.name}"
    if action == "status":
        yield LauncherCommand(("kubectl", "get", "jobset", record.name))
        yield LauncherCommand(("kubectl", "get", "pods", "--selector", label, "--output", "wide"))
    elif action == "logs":
        most = str(max(5, len(record.hosts)))
        words = ("--selector", label, "--prefix", "--tail", _TAIL, "--max-log-requests", most)
        yield LauncherCommand(("kubectl", "logs", *words))
    else:
        yield LauncherCommand(("kubectl", "delete", "--filename", "jobset.yaml"))


def _skypilot(folder: Path, record: _Record, action: Action) -> Iterator[LauncherCommand]:
    names = [f"{record.name}-{part}" for part in range(record.num_parts)]
    if action == "status":
        yield LauncherCommand(("sky", "status", *names))
        yield LauncherCommand(("sky", "queue", *names), may_fail=True)
        return
    words = ("logs", "--no-follow") if action == "logs" else ("cancel", "--yes", "--all")
    for name in names:
        yield LauncherCommand(("sky", *words, name))


def _kept(path: Path, pattern: re.Pattern[str]) -> str:
    """Return the first group of `pattern` in a one-line file that a script has written."""
    if not path.is_file():
        raise UsageError(f"{path}: there is none; {_NOT_STARTED}")
    text = read_text(path).strip()
    found = pattern.fullmatch(text)
    if found is None:
        raise UsageError(f"{path}:1: {text[:40]!r} is no number of a job; {_NOT_STARTED}")
    return found[1]
