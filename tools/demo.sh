#!/bin/sh
# The demo: plan a mixed cluster, explain the plan, print its flags, and prove it on this CPU.
#
#     tools/demo.sh BIN FOLDER      BIN has megatron-hetero; FOLDER receives plan.json
set -eu

bin=$1
folder=$2
example=examples/a100-rtx4090
PATH=$(cd "$bin" && pwd):$PATH
export PATH
mkdir -p "$folder"

run() {
    printf '\n$ megatron-hetero'
    printf ' %s' "$@"
    printf '\n\n'
    megatron-hetero "$@"
}

run plan --cluster "$example/cluster.yaml" --model "$example/gpt-7b.sh" -o "$folder/plan.json"
run explain "$folder/plan.json" --cluster "$example/cluster.yaml"
run flags "$folder/plan.json"
run verify "$folder/plan.json" --steps 5
