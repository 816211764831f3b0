#!/bin/bash
# A GPT with 18 heads, which neither 4 nor 5 GPUs divide, in fp16.
torchrun pretrain_gpt.py \
    --num-layers 28 \
    --hidden-size 1728 \
    --num-attention-heads 18 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --vocab-size 50257 \
    --micro-batch-size 1 \
    --global-batch-size 96 \
    --train-iters 50000 \
    --lr 2.0e-4 \
    --clip-grad 1.0 \
    --fp16 \
    --data-path data/corpus_text_document \
    --tokenizer-type NullTokenizer
