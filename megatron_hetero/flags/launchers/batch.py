"""What batch systems share: options (account, limit of time, cores and memory of a node), and the
script that submits a job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.job import (
    BatchOptions,
    LaunchFile,
    LaunchJob,
    by_kind,
    without_unused,
)
from megatron_hetero.flags.launchers.launcher import LaunchOption

JOB_ID_NAME = "job.id"
LOG_NAME = "job.log"

NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*")
"""A name that may stand in a line of a job's script."""

_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|UNLIMITED", re.ASCII)
_CORES = re.compile("[1-9][0-9]*")
_SIZE = re.compile("[0-9]+[KMGT]?")

_START = """\
#!/usr/bin/env bash
# Submits the job and keeps its number:   bash start.sh     from this folder, on a shared disk
set -euo pipefail
cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"
job=$({submit})
printf '%s\\n' "$job" >{job_id}
echo "start.sh: submitted as job $job; its log is $PWD/{log}"
"""

BATCH_OPTIONS = (
    LaunchOption("--account", "account that the job is charged to", "ACCOUNT"),
    LaunchOption("--time", "limit of the job's time", "[DAYS-]HH:MM:SS"),
    LaunchOption(
        "--cpus-per-task",
        "cores of a node's task, or of nodes with a kind of GPU; repeatable",
        "[GPU-TYPE=]VALUE",
        repeats=True,
    ),
    LaunchOption(
        "--mem",
        "memory of a node, or of nodes with a kind of GPU, as 400G; 0 is all; repeatable",
        "[GPU-TYPE=]SIZE",
        repeats=True,
    ),
)
"""What `read_batch` reads; a batch system has them among its options."""


def start_script(submit: str) -> LaunchFile:
    """Return the script that submits a job and keeps its number; `submit` prints the number."""
    text = _START.format(submit=submit, job_id=JOB_ID_NAME, log=LOG_NAME)
    return LaunchFile("start.sh", text, executable=True)


def check_name(option: str, value: str | None) -> None:
    """Refuse a value that is no plain word.

    Raises:
        UsageError: it is none.
    """
    # Values stand in the script's lines, so that only plain words are taken.
    if value is not None and not NAME_PATTERN.fullmatch(value):
        raise UsageError(f"{option} {value!r}: a name of letters, digits and _.,@+- is wanted")


def batch_options(
    account: str | None, time: str | None, cpus_per_task: Sequence[str], memory: Sequence[str]
) -> BatchOptions:
    """Return the shared options of the command line, checked.

    Args:
        account: name of the account to charge.
        time: limit, as MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]].
        cpus_per_task: `VALUE` for all nodes, or `GPU-TYPE=VALUE` for the nodes of one kind.
        memory: of a machine, in the same form.
    Raises:
        UsageError: a batch system could not read a value, or the same nodes have two values.
    """
    check_name("--account", account)
    if time is not None and not _TIME.fullmatch(time):
        raise UsageError(
            f"--time {time!r}: minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]] "
            "are wanted"
        )
    return BatchOptions(
        account,
        time,
        by_kind("--cpus-per-task", cpus_per_task, _CORES, "a number above 0"),
        by_kind("--mem", memory, _SIZE, "a size such as 400G, or 0 for all,"),
    )


def read_batch(given: Mapping[str, Any]) -> BatchOptions:
    """Return the shared options among the values of the command line, as `batch_options` does."""
    return batch_options(given["account"], given["time"], given["cpus_per_task"], given["mem"])


def without_unused_values[Options: BatchOptions](
    options: Options, job: LaunchJob
) -> tuple[Options, tuple[str, ...]]:
    """Return the options for machines of the plan, and notes on values for other known GPUs.

    Raises:
        UsageError: a kind is neither one of the plan's nor one of the catalogue's.
    """
    cpus, cpu_notes = without_unused("--cpus-per-task", options.cpus_per_task, job)
    memory, memory_notes = without_unused("--mem", options.memory, job)
    return replace(options, cpus_per_task=cpus, memory=memory), (*cpu_notes, *memory_notes)
