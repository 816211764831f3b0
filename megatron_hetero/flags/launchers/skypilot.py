"""SkyPilot: one task for each kind of node, since the nodes of a SkyPilot cluster are alike.

The clusters have to reach each other (one VPC, or one provider's network); the script starts the
first, asks for its address and starts the rest with it.
"""

from __future__ import annotations

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.job import Component, LaunchFile, LaunchJob
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

_TASK = """\
# {count} machine(s) with {gpus} x {gpu_type}: node ranks {first} to {last} of the plan
name: {name}-{index}
num_nodes: {count}
workdir: .
resources:
  accelerators: {accelerator}:{gpus}{image}
envs:
  # The address of the first node; start.sh fills it in for all tasks but the first.
  MASTER_ADDR: ""
setup: |
  pip install "megatron-hetero[runtime]"
run: |
  master=${{MASTER_ADDR:-$(echo "$SKYPILOT_NODE_IPS" | head -n 1)}}
  exec bash train.sh $(({first} + SKYPILOT_NODE_RANK)) "$master"
"""
_START = """\
#!/usr/bin/env bash
# Rents the machines and starts the plan on them:   bash start.sh
# `sky down '{name}-*'` gives them back.
set -euo pipefail
cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"
sky launch --yes --detach-run -c {name}-0 part-0.yaml
master=$(sky status --ip {name}-0)
{rest}sky logs {name}-0
"""


def skypilot_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """`train.sh`, a task for each kind of node, and the script that launches them.

    Raises:
        UsageError: a type of GPU that SkyPilot has no name for.
    """
    components = job.components
    tasks = [LaunchFile(f"part-{c.index}.yaml", _task(job, c)) for c in components]
    rest = "".join(
        f'sky launch --yes --detach-run -c {job.name}-{c.index} --env MASTER_ADDR="$master" '
        f"part-{c.index}.yaml\n"
        for c in components[1:]
    )
    start = LaunchFile("start.sh", _START.format(name=job.name, rest=rest), executable=True)
    return (node_script(job, hosts_are_rented=True), *tasks, start)


def _task(job: LaunchJob, component: Component) -> str:
    accelerator = _ACCELERATORS.get(component.gpu_type)
    if accelerator is None:
        raise UsageError(
            f"SkyPilot has no name for {component.gpu_type} that is known here "
            f"(known: {', '.join(sorted(_ACCELERATORS))}). Launch by ssh, Slurm or Kubernetes."
        )
    first, count = component.first_node_rank, len(component.hosts)
    return _TASK.format(
        count=count,
        gpu_type=component.gpu_type,
        first=first,
        last=first + count - 1,
        name=job.name,
        index=component.index,
        accelerator=accelerator,
        gpus=component.gpus_per_node,
        image=f"\n  image_id: docker:{job.image}" if job.image else "",
    )
