#!/usr/bin/env bash
# Rents the machines and starts the plan on them:   bash start.sh
# `sky down 'megatron-hetero-*'` gives them back.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
sky launch --yes --detach-run -c megatron-hetero-0 part-0.yaml
master=$(sky status --ip megatron-hetero-0)
sky launch --yes --detach-run -c megatron-hetero-1 --env MASTER_ADDR="$master" part-1.yaml
sky logs megatron-hetero-0
