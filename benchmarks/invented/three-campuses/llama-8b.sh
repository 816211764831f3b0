#!/bin/bash
# The shape of Llama 3 8B.
MODEL="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
BATCH="--seq-length 4096 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 256"

torchrun pretrain_gpt.py $MODEL $BATCH \
    --vocab-size 128256 \
    --tokenizer-type NullTokenizer \
    --train-iters 30000 --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine \
    --bf16 --use-distributed-optimizer \
    --data-path data/corpus_text_document
