"""Plain ssh: one script that starts every node and stops all when one fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.kept import kept_number
from megatron_hetero.flags.launchers.launcher import (
    LOG_LINES,
    Action,
    Launcher,
    LauncherCommand,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.node_script import PLAN_NAME, VENV_NAME, node_script
from megatron_hetero.flags.launchers.replanning import WATCH_CONNECTION

PID_NAME = "start.pid"

_HEAD = """\
#!/usr/bin/env bash
# Starts the plan on its machines over ssh, from any machine that reaches them:
#
#   bash start.sh
#
# This folder has to lie at the same path on all of them ({place}
# FOLDER and ENVIRONMENT (a script to source first, such as .venv/bin/activate) may be set.  The
# machines have to reach each other's ports: {port} of the first one, and those of NCCL and gloo.
"""
_COPIED = """\
a shared file system, or
# `rsync -a "$PWD/" HOST:"$PWD/"` to each).  A log for each node comes to logs/ here."""
_SHARED = """\
on a disk that they share,
# as --save does).  Where machines are lost, it plans for those that are left and goes on.
# A log for each node comes to logs/ here."""
_START = """\
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
folder=${{FOLDER:-$here}}
environment=${{ENVIRONMENT:-}}
master={master}
hosts=({hosts})
"""
_FIND_PLANNER = """\
if [ -x "$here/{venv}/bin/megatron-hetero" ]; then
    PATH=$here/{venv}/bin:$PATH
fi
if ! command -v megatron-hetero >/dev/null; then
    echo "start.sh: there is no megatron-hetero here, which plans again when a machine is lost" >&2
    exit 5
fi
"""
_IS_SHARED = """\
not_shared="train.sh: this folder is on no disk that all machines share"
command+=" && { grep -qsx $$ start.pid || { echo '$not_shared'; exit 2; }; }"
"""
_RUN = """\

mkdir -p -- "$here/logs"
echo "$$" >"$here/{pid}"
trap 'rm -f -- "$here/{pid}"' EXIT
command="cd -- $(printf %q "$folder")"
{is_shared}if [ -n "$environment" ]; then
    command+=" && source $(printf %q "$environment")"
fi
starters=()
# -tt: a remote process ends with its connection, so that stopping here stops it there.
for rank in "${{!hosts[@]}}"; do
    ssh -tt -o BatchMode=yes {watch}"${{hosts[$rank]}}" \\
        "$command && exec bash train.sh $rank $(printf %q "$master")" \\
        </dev/null >"$here/logs/node-$rank.log" 2>&1 &
    starters+=("$!")
done
stop() {{
    kill "${{starters[@]}}" 2>/dev/null || true
    wait || true
}}
trap 'stop; exit 130' INT TERM
"""
_END = """\
for _ in "${{starters[@]}}"; do
    if ! wait -n; then
        echo "start.sh: a node failed; the others are stopped. See $here/logs" >&2
        stop
        {then}
    fi
done
echo "start.sh: all nodes ended well"
"""


def ssh_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return `train.sh` and the script that starts it everywhere."""
    return (node_script(job), LaunchFile("start.sh", "".join(_parts(job)), executable=True))


def _parts(job: LaunchJob) -> Iterator[str]:
    # Head, variables, start of all nodes, and the wait; with replanning also what follows a loss.
    hosts, replanning = job.plan.hosts, job.replanning
    first = hosts[0].host
    yield _HEAD.format(place=_COPIED if replanning is None else _SHARED, port=job.master_port)
    yield _START.format(
        # After a loss another machine may be the first.
        master=f"${{MASTER_ADDR:-{first}}}" if replanning is None else first,
        hosts=" ".join(host.host for host in hosts),
    )
    if replanning is not None:
        yield _FIND_PLANNER.format(venv=VENV_NAME)
    yield _RUN.format(
        pid=PID_NAME,
        is_shared="" if replanning is None else _IS_SHARED,
        watch="" if replanning is None else WATCH_CONNECTION,
    )
    if replanning is not None:
        yield "\n" + replanning.lines(
            job.plan, job.more_flags, tuple(_options(job)), plan_name=PLAN_NAME, pid_name=PID_NAME
        )
        yield "\n"
    yield _END.format(then="exit 1" if replanning is None else "go_on")


def _options(job: LaunchJob) -> Iterator[str]:
    """Yield the options of `launch` that write this job's files."""
    # Equal options give equal files when the job is launched again.
    yield from ("--for", "ssh", "--name", job.name, "--master-port", str(job.master_port))
    if job.script is not None:
        yield from ("--script", job.script)
    for machine, name in job.interfaces:
        yield from ("--interface", f"{machine}={name}" if machine else name)
    if job.takes_public_addresses:
        yield "--public-addresses"


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    # pgrep fails where nothing runs, which is an answer too.
    if action == "status":
        for host in record.hosts:
            yield LauncherCommand(
                ("ssh", "-o", "BatchMode=yes", host, "pgrep -a torchrun"), may_fail=True
            )
    elif action == "logs":
        names = [f"logs/node-{rank}.log" for rank in range(len(record.hosts))]
        yield LauncherCommand(("tail", "-n", LOG_LINES, "--", *names))
    else:
        # The process of the file, if it is start.sh still, which then stops what it started.
        kept_number(folder / PID_NAME, re.compile("([0-9]+)"))
        yield LauncherCommand(("pkill", "-TERM", "-F", PID_NAME, "-f", "start[.]sh"))


SSH = Launcher("ssh", ssh_files, "bash {folder}/start.sh", _commands, can_replan=True)
