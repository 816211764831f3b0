#!/bin/bash
# A GPT of 7 billion parameters, its shape as in the GPT-3 paper.
torchrun pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 \
    --micro-batch-size 1 --global-batch-size 1024 \
    --train-iters 100000 --lr 1.2e-4 --bf16 --use-distributed-optimizer --overlap-grad-reduce \
    --data-path data/corpus_text_document --tokenizer-type NullTokenizer
