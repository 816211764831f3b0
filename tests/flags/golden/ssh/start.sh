#!/usr/bin/env bash
# Starts the plan on its machines over ssh, from any machine that reaches them:
#
#   bash start.sh
#
# This folder has to lie at the same path on all of them (a shared file system, or
# `rsync -a "$PWD/" HOST:"$PWD/"` to each).  A log for each node comes to logs/ here.
# FOLDER and ENVIRONMENT (a script to source first, such as .venv/bin/activate) may be set.  The
# machines have to reach each other's ports: 29500 of the first one, and those of NCCL and gloo.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
folder=${FOLDER:-$here}
environment=${ENVIRONMENT:-}
master=${MASTER_ADDR:-a.example}
hosts=(a.example b.example)

mkdir -p -- "$here/logs"
echo "$$" >"$here/start.pid"
trap 'rm -f -- "$here/start.pid"' EXIT
command="cd -- $(printf %q "$folder")"
if [ -n "$environment" ]; then
    command+=" && source $(printf %q "$environment")"
fi
starters=()
# -tt: a remote process ends with its connection, so that stopping here stops it there.
for rank in "${!hosts[@]}"; do
    ssh -tt -o BatchMode=yes "${hosts[$rank]}" \
        "$command && exec bash train.sh $rank $(printf %q "$master")" \
        </dev/null >"$here/logs/node-$rank.log" 2>&1 &
    starters+=("$!")
done
stop() {
    kill "${starters[@]}" 2>/dev/null || true
    wait || true
}
trap 'stop; exit 130' INT TERM
for _ in "${starters[@]}"; do
    if ! wait -n; then
        echo "start.sh: a node failed; the others are stopped. See $here/logs" >&2
        stop
        exit 1
    fi
done
echo "start.sh: all nodes ended well"
