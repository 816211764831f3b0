"""`train.sh`: one node's part of a plan, the same file on every node.

bash train.sh NODE_RANK [MASTER_ADDR]
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from megatron_hetero.flags.emit import is_stock, megatron_args, plan_arguments, render_bash
from megatron_hetero.flags.environment import (
    NODE_VARIABLE,
    EnvironmentSetting,
    interface_settings,
    job_settings,
    node_settings,
    visible_devices_variable,
)
from megatron_hetero.flags.launch import HETERO_ENTRY, ONE_MACHINE, STOCK_ENTRY
from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.replanning import FLAG
from megatron_hetero.flags.planned_sizes import check_more_flags
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Host

NAME = "train.sh"
VENV_NAME = "venv"
PLAN_NAME = "plan.json"
BY_NAME = "by-name"
HOST_VARIABLE = "MEGATRON_HETERO_HOST"
"""Host name by which `by-name` finds the rank where neither Slurm nor `hostname` says it, in a pod.

`NODE_VARIABLE` is the plan's name of the node, which `train.sh` says to the job.
"""

_HEAD = """\
#!/usr/bin/env bash
# One node's part of the plan {layout}
#
#   bash train.sh NODE_RANK [MASTER_ADDR]
#
# NODE_RANK counts the machines from 0 in the order below, or is {by_name}: this machine's name says
# it.  MASTER_ADDR is the first of them.
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
node_rank=${{1:?usage: bash train.sh NODE_RANK [MASTER_ADDR]}}
"""
_MASTER = """\
master_addr=${{2:-{master}}}
master_port=${{MASTER_PORT:-{port}}}
"""
_FIND_TORCHRUN = """\
# What install.sh installed beside this file comes first; else the environment as it is.
if [ -x "$here/{venv}/bin/torchrun" ]; then
    PATH=$here/{venv}/bin:$PATH
fi
if ! command -v torchrun >/dev/null; then
    echo "train.sh: there is no torchrun on $(hostname): {advice}" >&2
    exit 5
fi
"""
_GIVEN = """\
# Other jobs hold GPUs of this machine: the plan's numbers count the GPUs that Slurm gave.
IFS=, read -r -a given <<<"${CUDA_VISIBLE_DEVICES:-}"
"""
_NTH_GIVEN = "${{given[{}]:?fewer GPUs than planned}}"
_ADVICE_INSTALL = "run bash $here/install.sh here, or once on a disk that all machines share"
_ADVICE_PATH = "install megatron-hetero with its runtime, or put its environment on the PATH"


def node_script(job: LaunchJob, *, exports_names: bool = False) -> LaunchFile:
    """Return the `train.sh` of a job.

    Args:
        exports_names: the machines' host names at run time differ from the plan's, so that the
            script says the plan's name of each.
    Raises:
        UsageError: a flag of the user's is unknown or contradicts the plan.
    """
    return LaunchFile(NAME, "\n".join(_parts(job, exports_names)), executable=True)


def _parts(job: LaunchJob, exports_names: bool) -> Iterator[str]:
    hosts = job.plan.hosts
    yield _HEAD.format(layout=format_layout(job.plan.layout), by_name=BY_NAME) + (
        _MASTER.format(master=hosts[0].host, port=job.master_port) if hosts[1:] else ""
    )
    advice = _ADVICE_INSTALL if job.is_installed_by_script else _ADVICE_PATH
    yield _FIND_TORCHRUN.format(venv=VENV_NAME, advice=advice)
    # What holds on every node, then node by node in a `case`.
    yield from _exports((*job_settings(job.plan), *interface_settings(job.interface_of(""))))
    yield ""
    # The GPUs that Slurm gave, before the variable is set anew.
    if job.slurm.shares_nodes:
        yield _GIVEN
    yield from _rank_by_name(hosts)
    yield 'case "$node_rank" in'
    for node_rank, host in enumerate(hosts):
        yield f"{node_rank})  # {host.node}: {host.kind}"
        yield f"    num_processes={len(host.gpu_indices)}"
        # The plan's name of the machine, which its own host name does not say.
        if exports_names:
            yield f"    export {NODE_VARIABLE}={shlex.quote(host.node)}"
        settings = _settings_of(job, host)
        yield from (f"    {line}" for line in _exports(settings, job.slurm.shares_nodes))
        yield "    ;;"
    yield "*)"
    yield f'    echo "train.sh: node rank $node_rank; this plan has 0 to {len(hosts) - 1}" >&2'
    yield "    exit 2"
    yield "    ;;"
    yield "esac"
    yield ""
    # Megatron's arguments as an array, and torchrun, which takes the shell's place.
    yield from _arguments(job)
    yield ""
    yield "exec torchrun \\"
    processes = '--nproc-per-node "$num_processes" \\'
    if len(hosts) == 1:
        yield f"    {shlex.join(ONE_MACHINE)} {processes}"
    else:
        yield f'    --nnodes {len(hosts)} --node-rank "$node_rank" {processes}'
        yield '    --master-addr "$master_addr" --master-port "$master_port" \\'
    yield f'    {shlex.join(_entry(job))} "${{MEGATRON_ARGS[@]}}"'
    yield ""


def _settings_of(job: LaunchJob, host: Host) -> Iterator[EnvironmentSetting]:
    yield from node_settings(host)
    yield from interface_settings(job.interface_of(host.node))


def _rank_by_name(hosts: Sequence[Host]) -> Iterator[str]:
    yield f'if [ "$node_rank" = {BY_NAME} ]; then'
    yield f"    name=${{{HOST_VARIABLE}:-${{SLURMD_NODENAME:-$(hostname)}}}}"
    yield '    case "$name" in'
    # Hosts have passed `is_host_name`, so that none is a pattern of the shell.
    for node_rank, host in enumerate(hosts):
        yield f"    {host.host}) node_rank={node_rank} ;;"
    yield '    *) echo "train.sh: $name is none of the machines of this plan" >&2; exit 2 ;;'
    yield "    esac"
    yield "fi"


def _exports(
    settings: Iterable[EnvironmentSetting], gpus_are_given: bool = False
) -> Iterator[str]:
    reason = ""
    for setting in settings:
        # A reason is written once above all settings that have it.
        if setting.reason != reason:
            reason = setting.reason
            yield f"# {reason}"
        value = shlex.quote(setting.value)
        # NCCL's are advice, which a site may know better; the others belong to the plan.
        if setting.name.startswith("NCCL_"):
            value = f"${{{setting.name}:-{value}}}"
        if gpus_are_given and setting.name == visible_devices_variable("NCCL"):
            value = ",".join(_NTH_GIVEN.format(i) for i in setting.value.split(","))
        yield f"export {setting.name}={value}"


def _arguments(job: LaunchJob) -> Iterator[str]:
    is_replanned = job.replanning is not None
    # A job that may be planned again runs in the plug-in, which the next plan may need.
    argv = megatron_args(job.plan, PLAN_NAME, in_our_runtime=is_replanned)
    needs_file = argv[-2:] == ("--hetero-plan", PLAN_NAME)
    # Judged against the plan; then they come last, where Megatron's parser lets them win.
    plan_arguments(job.plan, job.more_flags, in_our_runtime=is_replanned)
    check_more_flags(job.plan, job.more_flags)
    ours = FLAG if is_replanned else ()
    yield render_bash([*(argv[:-2] if needs_file else argv), *job.more_flags, *ours])
    # The path is that of this folder, wherever the folder lies.
    if needs_file:
        yield f'MEGATRON_ARGS+=(--hetero-plan "$here/{PLAN_NAME}")'


def _entry(job: LaunchJob) -> tuple[str, ...]:
    # A plan of stock Megatron runs without this package.
    if is_stock(job.plan) and job.replanning is None:
        return (job.script,) if job.script else STOCK_ENTRY
    return ("-m", "megatron_hetero.launch", job.script) if job.script else HETERO_ENTRY
