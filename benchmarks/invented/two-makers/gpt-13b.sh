#!/bin/bash
# The shape of Llama 2 13B.
torchrun pretrain_gpt.py \
    --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 \
    --swiglu --normalization RMSNorm --disable-bias-linear \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 \
    --micro-batch-size 1 --global-batch-size 128 \
    --train-iters 20000 --lr 1.5e-4 --bf16 --sequence-parallel \
    --use-distributed-optimizer \
    --data-path data/corpus_text_document --tokenizer-type NullTokenizer
