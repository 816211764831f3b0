#!/bin/bash
# A GPT of 1.3 billion parameters (the shape of GPT-3 XL).
# megatron-hetero reads the model and the batch from here; it decides the parallel sizes itself.

GPT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --vocab-size 50257
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 64
    --train-iters 100000
    --optimizer adam
    --lr 2.0e-4
    --min-lr 2.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --clip-grad 1.0
    --bf16
)

DATA_ARGS=(
    --data-path data/corpus_text_document
    --split 949,50,1
    --tokenizer-type NullTokenizer
)

EVAL_ARGS=(
    --eval-interval 1000
    --eval-iters 10
)

torchrun pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_ARGS[@]}"
