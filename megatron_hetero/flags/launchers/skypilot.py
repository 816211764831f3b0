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
    of_kind,
)
from megatron_hetero.flags.launchers.launcher import (
    Action,
    Launcher,
    LauncherCommand,
    LaunchOption,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.node_script import node_script

_ACCELERATORS = {
    "A10": "A10",
    "A100-40GB": "A100",
    "A100-80GB": "A100-80GB",
    "A100-80GB-PCIe": "A100-80GB",
    "A30": "A30",
    "A40": "A40",
    "B200": "B200",
    "GH200-96GB": "GH200",
    "H100-80GB": "H100",
    "H100-PCIe": "H100",
    "H200": "H200",
    "L4": "L4",
    "L40": "L40",
    "L40S": "L40S",
    "MI300X": "MI300X",
    "RTX-3090": "RTX3090",
    "RTX-4090": "RTX4090",
    "RTX-5090": "RTX5090",
    "RTX-6000-Ada": "RTX6000-Ada",
    "RTX-A4000": "RTXA4000",
    "RTX-A5000": "RTXA5000",
    "RTX-A6000": "RTXA6000",
    "T4": "T4",
    "V100-16GB": "V100",
    "V100-32GB": "V100-32GB",
}
"""The catalogue's name -> SkyPilot's (`sky show-gpus --all`)."""

_INFRA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._*-]*(/[A-Za-z0-9._*-]+){0,3}")
_EPHEMERAL_PORTS = "32768-60999"
"""Ephemeral ports of Linux, from which NCCL and gloo take theirs."""

_TASK = """\
# {count} machine(s) with {gpus} x {gpu_type}: node ranks {first} to {last} of the plan
name: {name}-{index}
num_nodes: {count}
workdir: .
resources:
  accelerators: {accelerator}:{gpus}{infra}{spot}{image}{ports}
envs:
  # start.sh gives the first machine's address once all are rented; until then nothing runs.
  MASTER_ADDR: not-yet
{setup}run: |
  if [ "$MASTER_ADDR" = not-yet ]; then
    exit 0
  fi
  exec bash train.sh $(({first} + SKYPILOT_NODE_RANK)) "$MASTER_ADDR"
"""
_SETUP = """\
setup: |
  bash install.sh
"""
_PORTS = """
  # To every address of the internet: see SECURITY.md.
  ports: ["{port}", "{ephemeral}"]"""
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
    sky launch --yes -c "{name}-$part" "part-$part.yaml" >"logs/rent-$part.log" 2>&1 &
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
    sky exec --detach-run --env MASTER_ADDR="$master" "{name}-$part" "part-$part.yaml"
done
sky logs {name}-0
"""


def sky_options(infra: Sequence[str], *, is_spot: bool) -> SkyOptions:
    """Return the options of the command line, checked.

    Args:
        infra: `CLOUD[/REGION[/ZONE]]` for all nodes, or `GPU-TYPE=...` for those of one kind.
        is_spot: machines that the cloud may take away.
    Raises:
        UsageError: SkyPilot could not read a value, or the same nodes have two.
    """
    return SkyOptions(by_kind("--infra", infra, _INFRA, "CLOUD[/REGION]"), is_spot)


def skypilot_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Write `train.sh`, a task for each kind of node, and the script that launches them.

    Raises:
        UsageError: SkyPilot has no name for a type of GPU, or nothing would be installed.
    """
    if job.image is None and not job.is_installed_by_script:
        raise UsageError(
            "rented machines have no megatron-hetero: give --wheel (`make dist` builds it), or "
            "--image with it in (`make image`)"
        )
    components = job.components
    types = {component.gpu_type for component in components}
    for kind, value in job.sky.infra:
        if kind and kind not in types:
            raise UsageError(
                f"--infra {kind}={value}: the plan's nodes have {', '.join(sorted(types))}, not "
                f"{kind}"
            )
    tasks = [LaunchFile(f"part-{c.index}.yaml", _task(job, c)) for c in components]
    parts = [str(c.index) for c in components]
    names = " ".join(f"{job.name}-{part}" for part in parts)
    text = _START.format(name=job.name, parts=" ".join(parts), names=names)
    start = LaunchFile("start.sh", text, executable=True)
    return (node_script(job, hosts_are_rented=True), *tasks, start)


def _task(job: LaunchJob, component: Component) -> str:
    if component.hosts[0].gpu_types:
        raise UsageError(
            f"machine {component.hosts[0].node} has unlike GPUs ({component.gpu_type}), and a "
            "SkyPilot task asks for one kind. Launch by ssh, Slurm or Kubernetes."
        )
    accelerator = accelerator_name(component.gpu_type)
    first, count = component.first_node_rank, len(component.hosts)
    infra = of_kind(job.sky.infra, component)
    return _TASK.format(
        count=count,
        gpu_type=component.gpu_type,
        first=first,
        last=first + count - 1,
        name=job.name,
        index=component.index,
        accelerator=accelerator,
        gpus=component.gpus_per_node,
        infra="" if infra is None else f"\n  infra: {infra}",
        spot="\n  use_spot: true" if job.sky.is_spot else "",
        image=f"\n  image_id: docker:{job.image.removeprefix('docker:')}" if job.image else "",
        ports=_PORTS.format(port=job.master_port, ephemeral=_EPHEMERAL_PORTS)
        if job.opens_ports
        else "",
        setup=_SETUP if job.is_installed_by_script else "",
    )


def accelerator_name(gpu_type: str) -> str:
    """Return SkyPilot's name of a GPU of the catalogue.

    Raises:
        UsageError: it is not known here.
    """
    accelerator = _ACCELERATORS.get(gpu_type)
    if accelerator is None:
        raise UsageError(
            f"SkyPilot has no name for {gpu_type} that is known here "
            f"(known: {', '.join(sorted(_ACCELERATORS))}). Launch by ssh, Slurm or Kubernetes."
        )
    return accelerator


def _read_options(job: LaunchJob, given: Mapping[str, Any]) -> LaunchJob:
    options = sky_options(given["infra"], is_spot=given["spot"])
    return replace(job, sky=options, opens_ports=given["open_ports"])


def _clusters(record: LaunchRecord) -> list[str]:
    return [f"{record.name}-{part}" for part in range(record.num_parts)]


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    names = _clusters(record)
    if action == "status":
        yield LauncherCommand(("sky", "status", *names))
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
