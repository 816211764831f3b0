#!/bin/bash
# A GPT of 3 billion parameters; the optimizer's state is divided.
MODEL_ARGS=(
    --num-layers 30
    --hidden-size 2880
    --num-attention-heads 24
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 50257
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 40000
    --lr 1.6e-4
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
)
torchrun pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    --data-path data/corpus_text_document --tokenizer-type NullTokenizer
