"""PBS (OpenPBS, PBS Pro): one job with a chunk for each machine, and one task on each chunk.

`select` takes unlike chunks in one job. PBS_NODEFILE lists the machines in the order of the chunks,
which is that of the node ranks, once for each MPI process of a chunk (pbs_resources(7B)).
`pbs_tmrsh` starts a task on a machine of that file and ends with the exit status of the task;
`pbsdsh` ends with 0 whatever its tasks do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.batch import (
    BATCH_OPTIONS,
    JOB_ID_NAME,
    LOG_NAME,
    check_name,
    read_batch,
    start_script,
    without_unused_values,
)
from megatron_hetero.flags.launchers.job import (
    BatchOptions,
    LaunchFile,
    LaunchJob,
    PbsOptions,
    of_kind,
)
from megatron_hetero.flags.launchers.kept import kept_number
from megatron_hetero.flags.launchers.launcher import (
    LOG_LINES,
    Action,
    Launcher,
    LauncherCommand,
    LaunchOption,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.node_script import node_script

_JOB_ID = re.compile(r"([0-9]+(?:\.[A-Za-z0-9_][\w.-]*)?)", re.ASCII)

_BODY = """\
#PBS -l place=scatter:exclhost
#PBS -j oe

set -euo pipefail
cd -- "$PBS_O_WORKDIR"
# PBS copies its own log only when the job has ended.
exec >{log} 2>&1
# One line for each chunk, in their order, which is that of the node ranks.
mapfile -t nodes <"$PBS_NODEFILE"
if [ "${{#nodes[@]}}" != {count} ]; then
    echo "job.pbs: PBS gave ${{#nodes[@]}} machines, and the plan has {count}" >&2
    exit 1
fi
# A task starts in the home directory, with PBS' own PATH.
command="export PATH=$(printf %q "$PATH"); cd -- $(printf %q "$PBS_O_WORKDIR")"
for rank in "${{!nodes[@]}}"; do
    pbs_tmrsh "${{nodes[$rank]}}" bash -c "$command && exec bash train.sh $rank" &
done
# When this script ends, PBS ends what still runs on the other nodes.
for _ in "${{nodes[@]}}"; do
    wait -n || {{ echo "job.pbs: a node failed; the others are stopped" >&2; exit 1; }}
done
"""


def pbs_options(common: BatchOptions, queue: str | None = None) -> PbsOptions:
    """Return the options of the command line, checked.

    Args:
        common: the options of every batch system.
        queue: name of the queue.
    Raises:
        UsageError: PBS could not read a value, or has no word for it.
    """
    check_name("--queue", queue)
    if common.time == "UNLIMITED":
        raise UsageError(
            "--time UNLIMITED: PBS has no such limit; leave --time, and the queue's own holds"
        )
    if any(int(value.rstrip("KMGT")) == 0 for _, value in common.memory):
        raise UsageError("--mem 0: PBS has no word for all memory of a machine; give a size")
    return PbsOptions(**asdict(common), queue=queue)


def pbs_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return `train.sh`, `job.pbs`, and the script that submits it."""
    start = start_script("qsub job.pbs")
    return (node_script(job), LaunchFile("job.pbs", "".join(_parts(job))), start)


def _parts(job: LaunchJob) -> Iterator[str]:
    options = job.pbs
    yield "#!/usr/bin/env bash\n# Submitted by start.sh, from this folder, on a shared disk\n"
    yield f"#PBS -N {job.name}\n"
    for letter, value in (("A", options.account), ("q", options.queue)):
        if value is not None:
            yield f"#PBS -{letter} {value}\n"
    if options.time is not None:
        yield f"#PBS -l walltime={walltime(options.time)}\n"
    yield f"#PBS -l select={'+'.join(_chunks(job))}\n"
    yield _BODY.format(log=LOG_NAME, count=len(job.plan.hosts))


def _chunks(job: LaunchJob) -> Iterator[str]:
    # The very machines, whose links the plan was made for, with all of their GPUs.
    for component in job.components:
        cores = of_kind(job.pbs.cpus_per_task, component) or "1"
        memory = of_kind(job.pbs.memory, component)
        size = "" if memory is None else f":mem={_size(memory)}"
        for host in component.hosts:
            yield (
                f"1:ncpus={cores}:mpiprocs=1:ngpus={component.gpus_per_node}{size}:host={host.host}"
            )


def _size(memory: str) -> str:
    # A bare number is of megabytes to Slurm, whose form the option has, and of bytes to PBS.
    number = memory.rstrip("KMGT")
    return f"{number}{memory[len(number) :].lower() or 'm'}b"


def walltime(time: str) -> str:
    """Return a limit of time as PBS reads it, HOURS:MINUTES:SECONDS.

    Args:
        time: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]. PBS would
            read a bare number as seconds.
    """
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    # Behind days the first number is of hours; without days one or two begin with minutes.
    if not dash and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"


def _read_options(job: LaunchJob, given: Mapping[str, Any]) -> LaunchJob:
    options = pbs_options(read_batch(given), given["queue"])
    # Values for GPUs that the plan leaves idle become notes.
    options, notes = without_unused_values(options, job)
    if not options.cpus_per_task:
        notes = (
            *notes,
            "each machine's chunk asks for one core, to which a site with cgroups holds all of its "
            "processes: give --cpus-per-task",
        )
    return replace(job, pbs=options, notes=notes)


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    # The log lies in the folder, and needs no number of the job.
    if action == "logs":
        yield LauncherCommand(("tail", "-n", LOG_LINES, "--", LOG_NAME))
        return
    number = kept_number(folder / JOB_ID_NAME, _JOB_ID)
    if action == "status":
        # -x: ended jobs too, where the site keeps their history.
        yield LauncherCommand(("qstat", "-x", number), may_fail=True)
    else:
        yield LauncherCommand(("qdel", number))


PBS = Launcher(
    "pbs",
    pbs_files,
    "bash {folder}/start.sh",
    _commands,
    (*BATCH_OPTIONS, LaunchOption("--queue", "queue of the job", "QUEUE")),
    _read_options,
)
