"""Treatment of each Megatron flag on an asymmetric plan, as data for `flags.support.lookup`."""

from __future__ import annotations

from megatron_hetero.flags.support.kinds import Support
from megatron_hetero.flags.support.passed import FOLLOWED
from megatron_hetero.model.megatron_release import MEGATRON

SUPPORT: tuple[Support, ...] = (
    Support(
        "the plan's",
        "--tensor-model-parallel-size --pipeline-model-parallel-size --model-parallel-size "
        "--pipeline-model-parallel-layout --use-tp-pp-dp-mapping --num-layers --encoder-num-layers "
        "--global-batch-size --micro-batch-size --num-virtual-stages-per-pipeline-rank "
        "--num-layers-per-virtual-pipeline-stage --decoder-first-pipeline-num-layers "
        "--decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --context-parallel-size --batch-size "
        "--expert-model-parallel-size --expert-tensor-parallel-size "
        "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards",
    ),
    Support(
        "proved",
        "--step-batch-size-schedule --train-samples",
        "growing batches, each divided among the replicas as the plan's",
    ),
    Support(
        "refused",
        "--rampup-batch-size",
        f"use --step-batch-size-schedule; {MEGATRON} ignores --rampup-batch-size",
    ),
    Support(
        "proved",
        "--hidden-size --ffn-hidden-size --num-attention-heads --kv-channels --num-query-groups "
        "--group-query-attention --seq-length --max-position-embeddings --normalization "
        "--position-embedding-type --swiglu --untie-embeddings-and-output-weights "
        "--disable-bias-linear --add-qkv-bias --qk-layernorm --vocab-size "
        "--make-vocab-size-divisible-by",
        "the model",
    ),
    Support(
        "proved",
        "--sequence-parallel --recompute-granularity --recompute-method --recompute-num-layers "
        "--calculate-per-token-loss --overlap-grad-reduce --use-distributed-optimizer "
        "--overlap-param-gather "
        "--no-align-grad-reduce",
        "parallelism and memory",
    ),
    Support(
        "proved",
        "--optimizer",
        "adam and sgd; lion is not priced yet, and refused; so are muon, adaptive_muon and soap, "
        "whose update of a whole matrix would depend on its shards",
    ),
    Support(
        "proved",
        "--lr --weight-decay --clip-grad --adam-eps --train-iters --lr-decay-style --seed "
        "--eod-mask-loss",
        "the optimizer",
    ),
    Support(
        "proved",
        "--data-path --train-data-path --valid-data-path --split --tokenizer-type "
        "--dataloader-type --num-workers --data-cache-path --eval-iters --eval-interval "
        "--full-validation --multiple-validation-sets",
        "data; --dataloader-type external is refused",
    ),
    Support(
        "proved",
        "--save --load --save-interval --finetune --no-load-optim --no-save-optim "
        "--exit-on-missing-checkpoint --override-opt_param-scheduler --exit-interval "
        "--exit-duration-in-mins --exit-signal-handler --log-interval --log-params-norm "
        "--log-num-zeros-in-grad --distributed-timeout-minutes --distributed-backend "
        "--transformer-impl --use-cpu-initialization",
        "checkpoints, ends of a run, the log",
    ),
    Support(
        "proved",
        "--bf16 --fp16 --initial-loss-scale --loss-scale-window --hysteresis",
        "precision; all ranks agree on overflows, and so have one loss scale",
    ),
    Support(
        "refused",
        "--fp4-format "
        "--hybrid-layer-pattern --use-torch-fsdp2 --use-megatron-fsdp "
        "--hybrid-context-parallel "
        "--perform-rl-step --cuda-graph-impl "
        "--experimental-attention-variant "
        "--ckpt-format --use-mp-args-from-checkpoint-args "
        "--delay-wgrad-compute "
        "--defer-embedding-wgrad-compute "
        "--inprocess-restart --use-precision-aware-optimizer "
        "--optimizer-cpu-offload --distribute-saved-activations",
        "values other than Megatron's default",
    ),
    Support(
        "proved",
        "--no-initialization",
        "where --load has a checkpoint, whose weights take the place of those that are not drawn",
    ),
    Support(
        "refused",
        "--dist-ckpt-strictness",
        "log_unexpected and log_all are followed; with the others a plan's own entries of a "
        "checkpoint would be taken for faults",
        followed=("assume_ok_unexpected", "log_unexpected", "log_all"),
    ),
    Support(
        "no effect",
        "--num-distributed-optimizer-instances",
        "the optimizer's state is divided over all that hold a piece of the model",
    ),
    Support(
        "passed on",
        "--log-straggler --straggler-* --disable-straggler-on-startup",
        "Megatron's detector with each rank's own part of the work; its sensors need a GPU, on "
        "which it is untested. Rank 0 listens on --straggler-ctrlr-port, on loopback",
        neutral="log",
    ),
    Support(
        "refused",
        "--use-nccl-ub --use-ring-exchange-p2p "
        "--pipeline-model-parallel-comm-backend "
        "--load-main-params-from-ckpt --yaml-cfg "
        "--hybrid-override-pattern "
        "--fake-process-group --optimizer-cuda-graph --overlap-moe-expert-parallel-comm "
        "--vision-pretraining --logits-save-dir --logits-load-dir "
        "--fine-grained-activation-offloading --cpu-offloading-num-layers "
        "--overlap-param-gather-with-optimizer-step "
        "--init-model-with-meta-device --replication "
        "--run-workload-inspector-server",
        by_presence=True,
    ),
    Support(
        "no effect",
        "--nccl-communicator-config-path --use-sharp --sharp-enabled-group "
        "--high-priority-stream-groups --high-priority-a2a-comm-stream",
        "the plan makes its process groups itself",
    ),
    Support(
        "no effect",
        "--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush",
        "boundaries always send while computing, and ranks wait for what they receive",
    ),
    Support(
        "no effect",
        "--ddp-bucket-size --ddp-num-buckets --ddp-pad-buckets-for-high-nccl-busbw "
        "--ddp-average-in-collective --ddp-reduce-scatter-with-fp32-accumulation "
        "--no-align-param-gather --no-gradient-reduce-div-fusion "
        "--ddp-param-name-patterns-for-fp32-local-accumulation --create-all-gather-group "
        "--disable-symmetric-registration --suggested-communication-unit-size",
        "the gradient sync has buckets of its own",
    ),
    Support(
        "no effect",
        "--decrease-batch-size-if-needed --microbatch-group-size-per-virtual-pipeline-stage",
        "numbers of micro-batches, and their order, are the plan's",
    ),
    Support(
        "no effect",
        "--distributed-timeout-seconds-after-init",
        "holds for Megatron's groups only; use --distributed-timeout-minutes",
    ),
    Support(
        "proved",
        "--dist-ckpt-optim-fully-reshardable",
        "the state of the divided optimizer is written in the form that stock's distributed "
        "optimizer reads; other layouts read it with the flag or without",
    ),
    Support(
        "no effect",
        "--distrib-optim-fully-reshardable-mem-efficient",
        "each rank writes what it owns; nothing is gathered",
    ),
    Support(
        "no effect",
        "--no-data-sharding --use-same-sampling-seed-across-dp-ranks",
        "samples are dealt out from one process's order",
    ),
    Support(
        "proved",
        "--no-save-rng --no-load-rng --hidden-dropout --attention-dropout",
        "dropout and random states, each under its place in the plan; another plan's start anew",
    ),
    Support(
        "elsewhere",
        "--inference-* --rl-* --grpo-* --langrl-* --bert-* --biencoder-* --dino-* --ict-* "
        "--retriever-* --img-* --vision-* --swin-* --patch-dim --num-channels --num-classes "
        "--classes-fraction --data-per-class-fraction --mask-* --iter-per-epoch --head-lr-mult "
        "--sample-rate --titles-data-path --evidence-data-path --block-data-path "
        "--embedding-path --indexer-batch-size --indexer-log-interval --query-in-block-prob "
        "--use-one-sent-docs --short-seq-prob --output-bert-embeddings --decode-only-cuda-graphs "
        "--enable-chunked-prefill --flash-decode --max-tokens-to-oom --mlp-chunks-for-prefill "
        "--nccl-all-reduce-for-prefill --num-speculative-tokens --use-legacy-static-engine "
        "--refit-method --vocab-extra-ids --relative-attention-* --onnx-safe "
        "--chat-template --test-mode --symmetric-ar-type --batch-invariant-mode "
        "--pretrained-checkpoint --cache-mla-latents --mamba-inference-*",
        "inference, RL, fine-tuning, BERT, vision, retrieval",
    ),
    Support(
        "proved",
        "--num-experts --moe-router-topk --moe-ffn-hidden-size --moe-aux-loss-coeff "
        "--moe-z-loss-coeff",
        "experts, each divided over its stage's tensor-parallel group",
    ),
    *FOLLOWED,
    Support(
        "refused",
        "--moe-latent-size --moe-pad-expert-input-to-capacity "
        "--moe-use-upcycling --moe-input-jitter-eps --moe-router-force-biased "
        "--moe-router-force-load-balancing",
        "with --num-experts",
        asked_by="--num-experts",
    ),
    Support(
        "refused",
        "--moe-paged-stash",
        by_presence=True,
    ),
    Support(
        "elsewhere",
        "--moe-* --expert-tensor-* --overlap-dispatch-* --ep-overlap-* "
        "--use-fused-weighted-squared-relu --use-grouped-gemm-for-shared-expert",
        "details of a feature of experts that is refused",
    ),
    Support(
        "refused",
        "--fp8-recipe",
        "with --fp8-format; tensorwise is followed, and has to be asked for",
        asked_by="--fp8-format",
        followed=("tensorwise",),
    ),
    Support(
        "refused",
        "--fp8-param-gather --first-last-layers-bf16",
        "with --fp8-format",
        asked_by="--fp8-format",
    ),
    Support(
        "passed on",
        "--fp8-format --no-fp8-wgrad",
        "fp8 products of Transformer Engine, with --fp8-recipe tensorwise, where every GPU and "
        "shard of the plan allows it; untested, as everything on GPUs",
        neutral="GPU",
    ),
    Support(
        "elsewhere",
        "--fp8-* --fp4-* --num-layers-at-*-in-bf16 "
        "--keep-fp8-transpose-cache --te-precision-config-file --reuse-grad-buf-*",
        "details of fp4, which is refused, or of a way of fp8 that is",
    ),
    Support(
        "elsewhere",
        "--mamba-* --linear-* --disable-mamba-mem-eff-path --dsa-* --no-dsa-* --mtp-* "
        "--kitchen-* --use-kitchen-attention --hierarchical-context-parallel-sizes "
        "--max-seqlen-per-dp-cp-rank --muon-* --lion-* "
        "--no-use-layer-wise-param-layout",
        "details of a model, an optimizer or a parallelism that is refused",
    ),
    Support(
        "elsewhere",
        "--fsdp-* --megatron-fsdp-* --torch-fsdp2-* --data-parallel-sharding-strategy "
        "--outer-dp-sharding-strategy --enable-full-sharding-in-hsdp "
        "--no-strict-fsdp-dtensor-load --cuda-graph-* --enable-cuda-graph --external-cuda-graph "
        "--delay-offload-* --delta-offload-* --offload-modules --min-offloaded-tensor-size "
        "--activation-offload-fraction --cpu-offloading-* --fine-grained-offloading-* "
        "--replication-* --optimizer-offload-fraction --overlap-cpu-optimizer-* "
        "--use-torch-optimizer-for-* "
        "--no-pin-cpu-* --exp-avg-dtype --exp-avg-sq-dtype --main-grads-dtype "
        "--main-params-dtype --wgrad-deferral-limit "
        "--logits-* --fim-* --inprocess-* "
        "--non-persistent-* --ckpt-convert-*",
        "details of a feature that is refused",
    ),
)
