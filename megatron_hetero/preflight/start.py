"""The start of a job as Megatron judges it: its own parser and checks, asked in another process.

Megatron ends a job whose flags contradict each other (`validate_args`, `TransformerConfig`) when
all processes have started. Here they are asked before, where Megatron is installed, about the very
words that `flags` prints (`lab.doctor.start` is the other process).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_hetero.cluster.names import device_place
from megatron_hetero.flags.emit import megatron_args
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.script import OF_LIBRARIES
from megatron_hetero.plan.file import save_plan
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.job import Job
from megatron_hetero.schedule.stock import is_stock

LIMIT_S = 180.0
"""Limit of the other process, whose imports take some seconds."""
_ASKED = "megatron_hetero.lab.doctor.start"
_OTHER_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_NUM_FLAGS = 4
"""Flags that a finding names."""
_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*[a-z0-9]")
_NAME = re.compile(r"(?<=\bargs\.)[a-z0-9_]+|\b[a-z0-9]+(?:_[a-z0-9]+)+\b")
"""Names of parsed arguments: `args.lr`, or any words joined by underscores."""
_LONGEST = 400
"""Letters of a message of Megatron's."""

_INCOMPLETE = frozenset({"flags-missing", "flag-left-out"})
"""Findings after which the flags are not those that the job will have."""
_ENDS_START = frozenset(
    {
        "plan-not-for-cluster",
        "launch-refused",
        "hangs-on-gpus",
        "flag-refused",
        "batches-undivided",
        "connections-not-one",
        "connections-one",
        "overlap-without-partner",
        "flags-exclude",
        "grouped-gemm-unsupported",
    }
)
"""Errors at whose cause the start would end too, so that asking says nothing new."""


@dataclass(frozen=True)
class StartAnswer:
    """What Megatron said. `release` is that of the megatron-core that was asked; None if it said
    nothing that holds for the job, with the reason in `because`."""

    findings: tuple[Finding, ...] = ()
    release: str | None = None
    because: str = ""


def why_not_to_ask(findings: Iterable[Finding]) -> str | None:
    """Return the reason why Megatron is not worth asking after these findings; None if it is."""
    for finding in findings:
        if finding.id in _INCOMPLETE or (finding.id in _ENDS_START and finding.severity == "error"):
            return f"the job's flags are not in order yet: {finding.id}"
    return None


def ask_megatron(job: Job, limit_s: float = LIMIT_S) -> StartAnswer:
    """Ask Megatron's own parser and checks about the job's flags, for each kind of rank.

    Args:
        job: a job whose plan `flags` takes.
        limit_s: limit of the process that is asked, in seconds.
    """
    if job.plan.workload is None or not job.plan.workload.megatron_args:
        return StartAnswer(because="the plan has no flags of a job")
    with TemporaryDirectory(prefix="megatron-hetero-") as folder:
        question = json.dumps(question_of(job, Path(folder)))
        said = _said(question, folder, limit_s)
    return StartAnswer(because=said) if isinstance(said, str) else answer_of(job, said)


def answer_of(job: Job, said: Mapping[str, Any]) -> StartAnswer:
    """Return the answer to the question about a job, from what the other process said."""
    if said["refusal"]:
        return StartAnswer((_finding(job, said),), said["release"])
    if said["untold"]:
        return StartAnswer(
            because=f"its answer depends on this machine: {_one_line(said['untold'])}"
        )
    return StartAnswer(release=said["release"])


def question_of(job: Job, folder: Path) -> dict[str, Any]:
    """Return the question about a job: the words behind the entry, GPU and variables of each rank.

    Args:
        job: a job with flags.
        folder: an empty one, for the plan.
    """
    # The plug-in reads a plan that is more than its layout from a file.
    path = folder / "plan.json"
    save_plan(job.plan, path)
    assert job.plan.workload is not None
    return {
        "argv": megatron_args(job.plan, str(path)),
        "is_stock": is_stock(job.plan),
        "vocab_size": job.plan.workload.model.vocab_size,
        "environments": dict(job.environment),
        "ranks": [
            {
                "node": device_place(device)[0],
                "capability": job.cluster.node_of(device).gpu_type.compute_capability,
            }
            for device in job.devices
        ],
    }


def _said(question: str, folder: str, limit_s: float) -> dict[str, Any] | str:
    """Return what the other process said, or the reason why it said nothing."""
    process = subprocess.Popen(
        # As for a console script, nothing is imported from the folder that one stands in.
        [sys.executable, "-P", "-m", _ASKED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        cwd=folder,
        text=True,
        # A group of its own: it forks a process for each kind of rank.
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(question, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"it did not answer within {limit_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        last = (errors.strip().splitlines() or [f"status {process.returncode}"])[-1]
        return f"it does not start here: {_one_line(last)}"
    said: dict[str, Any] = json.loads(out)
    return said


def _environment() -> dict[str, str]:
    """Return the environment of the other process: this one's, without what a job is told by."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not OF_LIBRARIES.fullmatch(name) and name not in _OTHER_PROCESS
    }
    # Modules are found where this process finds them; no GPU is started for a question.
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",
    }


def _finding(job: Job, said: Mapping[str, Any]) -> Finding:
    refusal = said["refusal"]
    text = _one_line(refusal["said"])
    named = tuple(dict.fromkeys(_flags_named(refusal["said"], refusal["line"])))
    # Megatron often names flags that would help, too.
    flags = [flag for flag in named if job.has(flag)] or named[:_NUM_FLAGS]
    where = " ".join(flags) or "the job's flags"
    if refusal["rank"]:  # rank 0 is asked first
        where += f" (rank {refusal['rank']})"
    remedy = f"correct {' or '.join(flags) or 'the flags'} in the script, and plan again"
    variables = re.findall(r"\b[A-Z]+(?:_[A-Z0-9]+)+\b", text)
    if variables:
        remedy += f"; if the job has {variables[0]} in its environment, say so with --env"
    id_ = "megatron-refuses"
    if refusal["is_quoted"]:
        text = f'megatron-core {said["release"]} ends the job at its start: "{text}"'
    elif not is_stock(job.plan):
        id_ = "plug-in-refuses"
    return Finding(id_, "error", where, text, remedy)


def _flags_named(*texts: str) -> Iterator[str]:
    """Yield the flags that a refusal and its line of code speak of, by their longest names."""
    table = flag_table()
    by_dest = {flag.dest: flag.names[0] for flag in table.flags}
    for text in texts:
        flags = (table.by_name.get(name) for name in _FLAG.findall(text))
        yield from (flag.names[0] for flag in flags if flag is not None)
        yield from (by_dest[name] for name in _NAME.findall(text) if name in by_dest)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
