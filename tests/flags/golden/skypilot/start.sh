#!/usr/bin/env bash
# Rents the machines, installs on them, and starts the plan once all are there:   bash start.sh
# `sky down megatron-hetero-0 megatron-hetero-1` gives them back.
#
# The first machine is found by its private address, which the others reach inside one provider's
# network; for another network between them, set MASTER_ADDR to its address there.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
mkdir -p logs
parts=(0 1)
starters=()
for part in "${parts[@]}"; do
    sky launch --yes -c "megatron-hetero-$part" "part-$part.yaml" >"logs/rent-$part.log" 2>&1 &
    starters+=("$!")
done
for part in "${parts[@]}"; do
    if ! wait "${starters[$part]}"; then
        echo "start.sh: part $part was not rented: see $PWD/logs/rent-$part.log" >&2
        echo "start.sh: those that were stay rented: sky down megatron-hetero-0 megatron-hetero-1" >&2
        exit 1
    fi
done
master=${MASTER_ADDR:-$(ssh -o BatchMode=yes megatron-hetero-0 hostname -I | cut -d" " -f1)}
if [ -z "$master" ]; then
    echo "start.sh: the first machine has no address; set MASTER_ADDR" >&2
    exit 1
fi
for part in "${parts[@]}"; do
    sky exec --detach-run --env MASTER_ADDR="$master" "megatron-hetero-$part" "part-$part.yaml"
done
sky logs megatron-hetero-0
