"""Slurm: a heterogeneous job with one component for each kind of node, and one step over all.

Slurm orders the nodes by itself, so each node finds its rank by its name
(https://slurm.schedmd.com/heterogeneous_jobs.html). Every component repeats the site's options
(partition, account, time): a component does not inherit them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.batch import (
    BATCH_OPTIONS,
    JOB_ID_NAME,
    LOG_NAME,
    NAME_PATTERN,
    batch_options,
    check_name,
    start_script,
    without_unused_values,
)
from megatron_hetero.flags.launchers.job import (
    Component,
    LaunchFile,
    LaunchJob,
    SlurmOptions,
    by_kind,
    of_kind,
    without_unused,
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
from megatron_hetero.flags.launchers.node_script import BY_NAME, node_script

_JOB_ID = re.compile(r"([0-9]+)(?:;[\w.-]+)?")
_MOUNTS = re.compile(r"/[^\s'\"$`\\;,:]*(:[^\s'\"$`\\;,]+)?(,/[^\s'\"$`\\;,]+)*")

# One task to a node starts one process for each GPU: bound to the core of one task they would share
# it (--cpu-bind=none).
_BODY = """
set -euo pipefail
cd -- "$SLURM_SUBMIT_DIR"
exec srun{group} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --label \\
{container}    bash train.sh {by_name}
"""


def slurm_options(
    partition: Sequence[str],
    cpus_per_task: Sequence[str],
    account: str | None,
    qos: str | None,
    time: str | None,
    *,
    requeue: bool = False,
    mounts: str | None = None,
    shares_nodes: bool = False,
    memory: Sequence[str] = (),
) -> SlurmOptions:
    """Return the options of the command line, checked.

    Args:
        partition: `VALUE` for all nodes, or `GPU-TYPE=VALUE` for the nodes of one kind.
        cpus_per_task: in the same form.
        account: name of the account to charge.
        qos: name of the quality of service.
        time: limit, as MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]].
        requeue: the job goes back into the queue when a node of it fails.
        mounts: folders of the machine in its container, as pyxis takes them.
        shares_nodes: other jobs hold GPUs of the machines, and keep them.
        memory: of a machine, in the form of `partition`.
    Raises:
        UsageError: Slurm could not read a value, or the same nodes have two values.
    """
    common = batch_options(account, time, cpus_per_task, memory)
    check_name("--qos", qos)
    if mounts is not None and not _MOUNTS.fullmatch(mounts):
        raise UsageError(
            f"--container-mounts {mounts!r}: /FOLDER:/FOLDER is wanted, several by commas"
        )
    return SlurmOptions(
        **asdict(common),
        partition=by_kind("--partition", partition, NAME_PATTERN, "a name"),
        qos=qos,
        requeue=requeue,
        mounts=mounts,
        shares_nodes=shares_nodes,
    )


def slurm_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return `train.sh`, `job.sbatch`, and the script that submits it."""
    start = start_script("sbatch --parsable job.sbatch")
    return (node_script(job), LaunchFile("job.sbatch", "".join(_parts(job))), start)


def _parts(job: LaunchJob) -> Iterator[str]:
    components = job.components
    yield "#!/usr/bin/env bash\n# Submitted by start.sh, from this folder, on a shared disk\n"
    # A line `hetjob` between components makes a heterogeneous job of them.
    for component in components:
        if component.index:
            yield "#SBATCH hetjob\n"
        yield from _resources(job, component)
    # One step over all components, so that all nodes start together.
    group = f" --het-group=0-{len(components) - 1}" if len(components) > 1 else ""
    yield _BODY.format(group=group, container=_container(job), by_name=BY_NAME)


def _container(job: LaunchJob) -> str:
    """Return the options of srun's plug-in for containers, pyxis; the job's folder is in it."""
    if job.image is None:
        return ""
    # The job's folder first, with the plan and train.sh in it.
    mounts = ",".join(filter(None, ('"$SLURM_SUBMIT_DIR"', job.slurm.mounts)))
    return (
        f"    --container-image={shlex.quote(job.image)} --container-mounts={mounts} "
        '--container-workdir="$SLURM_SUBMIT_DIR" \\\n'
    )


def _resources(job: LaunchJob, component: Component) -> Iterator[str]:
    yield f"#SBATCH --job-name={job.name}\n"
    yield f"#SBATCH --nodes={len(component.hosts)}\n"
    yield "#SBATCH --ntasks-per-node=1\n"
    if not job.slurm.shares_nodes:
        # The plan's GPU numbers are those of the whole node.
        yield "#SBATCH --exclusive\n"
    yield f"#SBATCH --gpus-per-node={component.gpus_per_node}\n"
    # The very machines, whose links the plan was made for.
    yield f"#SBATCH --nodelist={','.join(host.host for host in component.hosts)}\n"
    yield f"#SBATCH --output={LOG_NAME}\n"
    options = job.slurm
    if options.requeue:
        yield "#SBATCH --requeue\n"
    # Every component repeats the site's options.
    for name, value in (
        ("partition", of_kind(options.partition, component)),
        ("account", options.account),
        ("qos", options.qos),
        ("time", options.time),
        ("cpus-per-task", of_kind(options.cpus_per_task, component)),
        ("mem", of_kind(options.memory, component)),
    ):
        if value is not None:
            yield f"#SBATCH --{name}={value}\n"


def _read_options(job: LaunchJob, given: Mapping[str, Any]) -> LaunchJob:
    if given["container_mounts"] and not job.image:
        raise UsageError("--container-mounts goes with --image, the container")
    options = slurm_options(
        given["partition"],
        given["cpus_per_task"],
        given["account"],
        given["qos"],
        given["time"],
        requeue=given["requeue"],
        mounts=given["container_mounts"],
        shares_nodes=given["share_nodes"],
        memory=given["mem"],
    )
    # Values for GPUs that the plan leaves idle become notes.
    partition, unused = without_unused("--partition", options.partition, job)
    options, unused_values = without_unused_values(replace(options, partition=partition), job)
    notes = [*unused, *unused_values]
    if options.shares_nodes:
        notes += _check_shared(job, options)
    return replace(job, slurm=options, notes=tuple(notes))


def _check_shared(job: LaunchJob, options: SlurmOptions) -> Iterator[str]:
    """Yield notes on a job beside others.

    Raises:
        UsageError: a machine has unlike GPUs, of which Slurm chooses.
    """
    for host in job.plan.hosts:
        if host.gpu_types:
            raise UsageError(
                f"--share-nodes: machine {host.node} has unlike GPUs ({host.kind}), and which of "
                "them Slurm gives is not known before; launch without, when it is free"
            )
    if not options.cpus_per_task:
        yield (
            "beside other jobs Slurm gives each machine's task as many cores as the site's default "
            "says, often a single one: give --cpus-per-task, and --mem"
        )


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    # The log lies in the folder, and needs no number of the job.
    if action == "logs":
        yield LauncherCommand(("tail", "-n", LOG_LINES, "--", LOG_NAME))
        return
    number = kept_number(folder / JOB_ID_NAME, _JOB_ID)
    # squeue forgets ended jobs, and a site may keep no accounts for sacct.
    if action == "status":
        yield LauncherCommand(("squeue", "--jobs", number), may_fail=True)
        columns = "JobID,JobName,State,ExitCode,Elapsed,NodeList"
        yield LauncherCommand(("sacct", "--jobs", number, f"--format={columns}"), may_fail=True)
    else:
        yield LauncherCommand(("scancel", number))


SLURM = Launcher(
    "slurm",
    slurm_files,
    "bash {folder}/start.sh",
    _commands,
    (
        *BATCH_OPTIONS,
        LaunchOption(
            "--partition",
            "partition of all nodes, or of those with a kind of GPU; may be repeated",
            "[GPU-TYPE=]VALUE",
            repeats=True,
        ),
        LaunchOption("--qos", "quality of service", "QOS"),
        LaunchOption(
            "--share-nodes",
            "nodes on which other jobs hold GPUs (init --free): without --exclusive, and with the "
            "GPUs that Slurm gives",
        ),
        LaunchOption("--requeue", "put the job back into the queue when a node of it fails"),
        LaunchOption(
            "--container-mounts",
            "with --image: folders of the machines in the container, beside the job's own",
            "/FOLDER:/FOLDER",
        ),
    ),
    _read_options,
    takes_image=True,
)
