#!/bin/sh
# The demo: plan a mixed cluster, explain the plan, print its flags, prove it on this CPU, and train
# a small model of bytes on real text for a few steps.
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

# From text to training: this repository's pages, a token for each byte, three unlike processes.
# Megatron finds its indices of samples again by the name of the text alone.
rm -f "$folder"/pages_text_document.bin "$folder"/pages_text_document.idx
rm -rf "$folder/cache"
run data README.md docs/*.md -o "$folder/pages" --bytes

# Of one machine, through a file: `torchrun --standalone` would listen on all interfaces.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
printf '\n$ torchrun --rdzv-conf store_type=file ... -m megatron_hetero.pretrain_gpt ...\n\n'
torchrun --rdzv-backend c10d --rdzv-conf store_type=file --local-addr localhost \
    --nproc-per-node 3 -m megatron_hetero.pretrain_gpt \
    --hetero-layout "tp2:3 @2 | tp1:3 @1" \
    --num-layers 3 --hidden-size 64 --num-attention-heads 4 \
    --seq-length 128 --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0 \
    --micro-batch-size 4 --global-batch-size 12 --train-iters 20 --lr 3e-3 \
    --data-path "$folder/pages_text_document" --tokenizer-type NullTokenizer --vocab-size 257 \
    --data-cache-path "$folder/cache" --split 9,1,0 --eval-interval 10 --eval-iters 1 \
    --log-interval 5 --num-workers 0 2>&1 | grep 'lm loss'
