"""Status, logs and stop of a launched job, by the tools of its launcher.

`launch` writes `launch.json` into its folder; the commands, as argument vectors, follow from it.
"""

from __future__ import annotations

from pathlib import Path

from megatron_hetero.errors import FileFormatError, UnsupportedError
from megatron_hetero.files import read_json, validate_document
from megatron_hetero.flags.launchers.job import JOB_NAME, LaunchJob
from megatron_hetero.flags.launchers.launcher import (
    Action,
    Launcher,
    LauncherCommand,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.plan.checks.devices import is_host_name

RECORD_NAME = "launch.json"


def record_of(job: LaunchJob, launcher: str) -> dict[str, object]:
    """Return the content of `launch.json`."""
    return {
        "launcher": launcher,
        "name": job.name,
        "hosts": [host.host for host in job.plan.hosts],
        "num_parts": len(job.components),
    }


def read_record(folder: Path) -> tuple[Launcher, LaunchRecord]:
    """Read the launcher and the record of a folder.

    Raises:
        FileFormatError: `launch.json` is missing, or differs from what `launch` writes.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        raise FileFormatError(f"{path}: there is none; name a folder that `launch` wrote")
    record = validate_document(read_json(path), LaunchRecord, FileFormatError)
    # The file may have been edited, and its names become words of commands.
    if record.launcher not in LAUNCHERS:
        raise FileFormatError(
            f"{path}:1: launcher {record.launcher!r} is not known; known are {', '.join(LAUNCHERS)}"
        )
    if not JOB_NAME.fullmatch(record.name) or not all(map(is_host_name, record.hosts)):
        raise FileFormatError(f"{path}:1: a name in it is not one that `launch` writes")
    return LAUNCHERS[record.launcher], record


def commands_of(folder: Path, action: Action) -> tuple[LauncherCommand, ...]:
    """Return the commands that carry out an action on the job of a folder.

    Raises:
        FileFormatError: `launch.json` is missing, or differs from what `launch` writes.
        UsageError: the job was not started, or has ended.
        UnsupportedError: the launcher has no such tool.
    """
    launcher, record = read_record(folder)
    if launcher.commands is None:
        raise UnsupportedError(
            f"--{action}: with --for {launcher.name} every machine was started by hand and knows "
            "no other"
        )
    return tuple(launcher.commands(folder, record, action))
