"""Plain ssh: one script that starts every node and stops all when one fails."""

from __future__ import annotations

from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.node_script import node_script

PID_NAME = "start.pid"

_START = """\
#!/usr/bin/env bash
# Starts the plan on its machines over ssh, from any machine that reaches them:
#
#   bash start.sh
#
# This folder has to lie at the same path on all of them (a shared file system, or
# `rsync -a "$PWD/" HOST:"$PWD/"` to each).  A log for each node comes to logs/ here.
# FOLDER and ENVIRONMENT (a script to source first, such as .venv/bin/activate) may be set.  The
# machines have to reach each other's ports: {port} of the first one, and those of NCCL and gloo.
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
folder=${{FOLDER:-$here}}
environment=${{ENVIRONMENT:-}}
master=${{MASTER_ADDR:-{master}}}
hosts=({hosts})

mkdir -p -- "$here/logs"
echo "$$" >"$here/{pid}"
trap 'rm -f -- "$here/{pid}"' EXIT
command="cd -- $(printf %q "$folder")"
if [ -n "$environment" ]; then
    command+=" && source $(printf %q "$environment")"
fi
starters=()
# -tt: a remote process ends with its connection, so that stopping here stops it there.
for rank in "${{!hosts[@]}}"; do
    ssh -tt -o BatchMode=yes "${{hosts[$rank]}}" \\
        "$command && exec bash train.sh $rank $(printf %q "$master")" \\
        </dev/null >"$here/logs/node-$rank.log" 2>&1 &
    starters+=("$!")
done
stop() {{
    kill "${{starters[@]}}" 2>/dev/null || true
    wait || true
}}
trap 'stop; exit 130' INT TERM
for _ in "${{starters[@]}}"; do
    if ! wait -n; then
        echo "start.sh: a node failed; the others are stopped. See $here/logs" >&2
        stop
        exit 1
    fi
done
echo "start.sh: all nodes ended well"
"""


def ssh_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Write `train.sh` and the script that starts it everywhere."""
    hosts = job.plan.hosts
    start = _START.format(
        master=hosts[0].host,
        port=job.master_port,
        pid=PID_NAME,
        hosts=" ".join(host.host for host in hosts),
    )
    return (node_script(job), LaunchFile("start.sh", start, executable=True))
