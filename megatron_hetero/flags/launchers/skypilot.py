"""SkyPilot: one task for each kind of node, since the nodes of a SkyPilot cluster are alike.

The script rents all machines, then starts the plan with the private address of the first. Inside
one provider and region, SkyPilot's own network lets its clusters reach each other. `ports` would
open them to the whole internet instead, and on AWS would move each cluster into its own security
group, which blocks all traffic between clusters but for these ports (`sky/clouds/aws.py`). Ports
are therefore opened only on request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.job import (
    Component,
    LaunchFile,
    LaunchJob,
    SkyOptions,
    by_kind,
    indented,
    of_kind,
    without_unused,
)
from megatron_hetero.flags.launchers.launcher import (
    Action,
    Launcher,
    LauncherCommand,
    LaunchOption,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.node_script import node_script
from megatron_hetero.flags.launchers.sky_names import accelerator_name
from megatron_hetero.flags.launchers.sky_tasks import (
    JOB_FOLDER,
    CarriedTask,
    read_carried_task,
    resources_at,
    yaml_block,
    yaml_value,
)

_INFRA = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._*-]*(/[A-Za-z0-9._*:@+-]+){0,8}", re.ASCII)
"""Also a context of Kubernetes behind `k8s/`, such as `arn:aws:eks:REGION:NUMBER:cluster/NAME`."""
_TASK_FILE = re.compile(r"[^=]{1,4096}")
_EPHEMERAL_PORTS = "32768-60999"
"""Ephemeral ports of Linux, from which NCCL and gloo take theirs."""

_TASK = """\
# {count} machine(s) with {gpus} x {gpu_type}: node ranks {first} to {last} of the plan
name: {name}-{index}
num_nodes: {count}
workdir: {workdir}
resources:
  accelerators: {accelerator}:{gpus}
{resources}envs:
  # start.sh gives the first machine's address once all are rented; until then nothing runs.
  MASTER_ADDR: not-yet
{envs}{more}{setup}run: |
  if [ "$MASTER_ADDR" = not-yet ]; then
    exit 0
  fi
  exec bash {folder}train.sh $(({first} + SKYPILOT_NODE_RANK)) "$MASTER_ADDR"
"""
_START = """\
#!/usr/bin/env bash
# Rents the machines, installs on them, and starts the plan once all are there:   bash start.sh
# `sky down {names}` gives them back.
#
# The first machine is found by its private address, which the others reach inside one provider's
# network; for another network between them, set MASTER_ADDR to its address there.
set -euo pipefail
cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"
mkdir -p logs
parts=({parts})
starters=()
for part in "${{parts[@]}}"; do
    sky launch --yes{passed} -c "{name}-$part" "part-$part.yaml" >"logs/rent-$part.log" 2>&1 &
    starters+=("$!")
done
for part in "${{parts[@]}}"; do
    if ! wait "${{starters[$part]}}"; then
        echo "start.sh: part $part was not rented: see $PWD/logs/rent-$part.log" >&2
        echo "start.sh: those that were stay rented: sky down {names}" >&2
        exit 1
    fi
done
master=${{MASTER_ADDR:-$(ssh -o BatchMode=yes {name}-0 hostname -I | cut -d" " -f1)}}
if [ -z "$master" ]; then
    echo "start.sh: the first machine has no address; set MASTER_ADDR" >&2
    exit 1
fi
for part in "${{parts[@]}}"; do
    sky exec --detach-run{passed} --env MASTER_ADDR="$master" "{name}-$part" "part-$part.yaml"
done
sky logs {name}-0
"""


def sky_options(infra: Sequence[str], tasks: Sequence[str] = (), *, is_spot: bool) -> SkyOptions:
    """Return the options of the command line, checked.

    Args:
        infra: `CLOUD[/REGION[/ZONE]]` for all nodes, or `GPU-TYPE=...` for those of one kind.
        tasks: files of SkyPilot tasks in the same form, whose machines and files are taken over.
        is_spot: machines that the cloud may take away.
    Raises:
        FileFormatError, ClusterError: a task cannot be read.
        UsageError: SkyPilot could not read a value, or the same nodes have two.
    """
    paths = by_kind("--task", tasks, _TASK_FILE, "a file")
    read = ((kind, read_carried_task(Path(path), Path.cwd())) for kind, path in paths)
    return SkyOptions(by_kind("--infra", infra, _INFRA, "CLOUD[/REGION]"), is_spot, tuple(read))


def skypilot_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return `train.sh`, a task for each kind of node, and the script that launches them.

    Raises:
        UsageError: SkyPilot has no name for a type of GPU, a task has other machines than the plan,
            or nothing would be installed.
    """
    if job.image is None and not job.is_installed_by_script:
        raise UsageError(
            "rented machines have no megatron-hetero: give --wheel (`make dist` builds it), or "
            "--image with it in (`make image`)"
        )
    # A SkyPilot cluster for each component, because its nodes are alike.
    components = job.components
    tasks = [LaunchFile(f"part-{c.index}.yaml", _task(job, c)) for c in components]
    parts = [str(c.index) for c in components]
    names = " ".join(f"{job.name}-{part}" for part in parts)
    # Every task's variables are passed on by the one script, each once.
    pairs = (pair for _, task in job.sky.tasks for pair in task.passed)
    text = _START.format(
        name=job.name,
        parts=" ".join(parts),
        names=names,
        passed="".join(f" {option} {name}" for option, name in dict.fromkeys(pairs)),
    )
    start = LaunchFile("start.sh", text, executable=True)
    return (node_script(job, exports_names=True), *tasks, start)


def _task(job: LaunchJob, component: Component) -> str:
    if component.hosts[0].gpu_types:
        raise UsageError(
            f"machine {component.hosts[0].node} has unlike GPUs ({component.kind}), and a "
            "SkyPilot task asks for one kind. Launch by ssh, Slurm or Kubernetes."
        )
    # The task of the user's, where there is one; else a task of nothing but the plan.
    carried = of_kind(job.sky.tasks, component)
    if carried is None:
        carried = CarriedTask.of_plan(accelerator_name(component.kind), component.gpus_per_node)
    elif carried.count != component.gpus_per_node:
        raise UsageError(
            f"--task {carried.path}: its machines have {carried.accelerator}:{carried.count}, and "
            f"those of the plan {component.gpus_per_node} x {component.kind}"
        )
    image = f"docker:{job.image.removeprefix('docker:')}" if job.image else None
    resources = resources_at(
        carried, of_kind(job.sky.infra, component), is_spot=job.sky.is_spot, image=image
    )
    # The task's own ports stay open as well.
    if job.opens_ports:
        own = resources.pop("ports", [])
        own = own if isinstance(own, list) else [own]
        resources["ports"] = [*map(str, own), str(job.master_port), _EPHEMERAL_PORTS]
    # The launch's own folder is the working directory, or is mounted beside the user's.
    is_beside = carried.workdir is not None
    mounts = dict(carried.file_mounts) | ({JOB_FOLDER: "."} if is_beside else {})
    folder = f"{JOB_FOLDER}/" if is_beside else ""
    return _TASK.format(
        count=len(component.hosts),
        gpu_type=component.kind,
        first=component.first_node_rank,
        last=component.first_node_rank + len(component.hosts) - 1,
        name=job.name,
        index=component.index,
        accelerator=carried.accelerator,
        gpus=component.gpus_per_node,
        workdir=yaml_value(carried.workdir) if is_beside else ".",
        resources=yaml_block(resources, 2),
        envs=yaml_block({k: v for k, v in carried.envs.items() if k != "MASTER_ADDR"}, 2),
        more=yaml_block(
            ({"secrets": dict.fromkeys(carried.secrets)} if carried.secrets else {})
            | ({"file_mounts": mounts} if mounts else {})
            | dict(carried.more),
            0,
        ),
        setup=_setup(carried, f"bash {folder}install.sh" if job.is_installed_by_script else None),
        folder=folder,
    )


def _setup(carried: CarriedTask, install: str | None) -> str:
    """Return the entry of the commands that prepare a machine: the task's own, then ours."""
    lines = [*(carried.setup or "").splitlines(), *([install] if install else [])]
    if not lines:
        return ""
    # YAML would take the first line's blanks for the indentation of all.
    mark = "|2" if lines[0].startswith((" ", "\t")) else "|"
    return f"setup: {mark}\n{indented(lines, by=2)}"


def _read_options(job: LaunchJob, given: Mapping[str, Any]) -> LaunchJob:
    read = sky_options(given["infra"], given["task"], is_spot=given["spot"])
    # Values for GPUs that the plan leaves idle become notes.
    infra, unused = without_unused("--infra", read.infra, job)
    tasks, without_task = without_unused("--task", read.tasks, job)
    options = replace(read, infra=infra, tasks=tasks)
    notes = (*unused, *without_task, *(note for _, task in tasks for note in task.notes))
    return replace(job, sky=options, opens_ports=given["open_ports"], notes=notes)


def _clusters(record: LaunchRecord) -> list[str]:
    return [f"{record.name}-{part}" for part in range(record.num_parts)]


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    names = _clusters(record)
    if action == "status":
        yield LauncherCommand(("sky", "status", *names))
        # A cluster that is not up has no queue.
        yield LauncherCommand(("sky", "queue", *names), may_fail=True)
        return
    words = ("logs", "--no-follow") if action == "logs" else ("cancel", "--yes", "--all")
    for name in names:
        yield LauncherCommand(("sky", *words, name))


def _after_stop(record: LaunchRecord) -> str:
    return f"the machines stay rented; sky down {' '.join(_clusters(record))} gives them back"


SKYPILOT = Launcher(
    "skypilot",
    skypilot_files,
    "bash {folder}/start.sh",
    _commands,
    (
        LaunchOption(
            "--infra",
            "where all machines are rented, or those with a kind of GPU; may be repeated",
            "[GPU-TYPE=]CLOUD[/REGION]",
            repeats=True,
        ),
        LaunchOption(
            "--task",
            "a SkyPilot task of your own, for all machines or those with a kind of GPU: its "
            "resources, workdir, file_mounts, envs and setup go into the written one; repeatable",
            "[GPU-TYPE=]TASK.YAML",
            repeats=True,
        ),
        LaunchOption("--spot", "rent machines that the cloud may take away"),
        LaunchOption(
            "--open-ports",
            "open the rendezvous and the ports of NCCL and gloo to every address, for machines "
            "that firewalls part inside one network; read SECURITY.md before",
        ),
    ),
    _read_options,
    brings_folder=True,
    takes_image=True,
    after_stop=_after_stop,
)
