#!/usr/bin/env bash
# Submits the job and keeps its number:   bash start.sh     from this folder, on a shared disk
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
job=$(qsub job.pbs)
printf '%s\n' "$job" >job.id
echo "start.sh: submitted as job $job; its log is $PWD/job.log"
