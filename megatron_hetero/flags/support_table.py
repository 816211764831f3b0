"""How an asymmetric plan treats each of Megatron's flags, as data (`flags.support` reads it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["proved", "passed on", "the plan's", "refused", "no effect", "elsewhere"]

MEANING: dict[Status, str] = {
    "proved": "followed; a test compares with stock Megatron",
    "passed on": "followed by Megatron's own code, which the plan does not touch; no test of ours",
    "the plan's": "decided by the plan; a flag that says otherwise is refused",
    "refused": "refused by name before anything starts",
    "no effect": "accepted with a warning, and changes nothing: the plan's own way takes its place",
    "elsewhere": "of another kind of job, or a detail of a feature named here; GPT pre-training on "
    "a plan never reads it",
}


@dataclass(frozen=True)
class Support:
    """`names` are flags and patterns (`*`), divided by spaces.

    `by_presence`: refused wherever it is given; other refusals look at values
    (`runtime.support`).  `asked_by`: refused only beside that flag.  `followed`: values that are
    not refused; of other flags Megatron's default is the only one.
    """

    status: Status
    names: str
    note: str = ""
    by_presence: bool = False
    asked_by: str = ""
    followed: tuple[str, ...] = ()


SUPPORT: tuple[Support, ...] = (
    Support(
        "the plan's",
        "--tensor-model-parallel-size --pipeline-model-parallel-size --model-parallel-size "
        "--pipeline-model-parallel-layout --use-tp-pp-dp-mapping --num-layers --encoder-num-layers "
        "--global-batch-size --micro-batch-size --num-virtual-stages-per-pipeline-rank "
        "--num-layers-per-virtual-pipeline-stage --decoder-first-pipeline-num-layers "
        "--decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --context-parallel-size --batch-size",
    ),
    Support(
        "proved",
        "--step-batch-size-schedule --train-samples",
        "growing batches, each divided among the replicas as the plan's",
    ),
    Support(
        "refused",
        "--rampup-batch-size",
        "use --step-batch-size-schedule; Megatron 0.19 ignores --rampup-batch-size",
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
        "--optimizer --lr --weight-decay --clip-grad --adam-eps --train-iters --lr-decay-style "
        "--seed --eod-mask-loss",
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
        "--expert-model-parallel-size "
        "--fp4-format --fp32-residual-connection --mtp-num-layers --multi-latent-attention "
        "--hybrid-layer-pattern --use-torch-fsdp2 --use-megatron-fsdp "
        "--phase-transition-iterations --eval-global-batch-size --eval-micro-batch-size --sft "
        "--hybrid-context-parallel --dataloader-inter-document-masking "
        "--perform-rl-step --save-wgrads-interval --cuda-graph-impl --iterations-to-skip "
        "--softmax-type --experimental-attention-variant --heterogeneous-layers-config-path "
        "--heterogeneous-layers-config-encoded-json --qk-clip --log-max-attention-logit "
        "--tensor-parallel-num-weight-shards --tp-comm-overlap --reset-attention-mask "
        "--ckpt-format --non-persistent-ckpt-type --use-mp-args-from-checkpoint-args "
        "--save-params-interval --save-dgrads-interval --save-activations-interval "
        "--check-weight-hash-across-dp-replicas-interval --delay-wgrad-compute "
        "--defer-embedding-wgrad-compute --fim-data --per-dataset-sequences-path "
        "--inprocess-restart --use-precision-aware-optimizer "
        "--optimizer-cpu-offload --num-distributed-optimizer-instances",
        "values other than Megatron's default",
    ),
    Support(
        "passed on",
        "--log-straggler --straggler-* --disable-straggler-on-startup",
        "Megatron's detector with each rank's own part of the work; its sensors need a GPU, on "
        "which it is untested. Rank 0 listens on --straggler-ctrlr-port, on all interfaces",
    ),
    Support(
        "refused",
        "--use-nccl-ub --use-ring-exchange-p2p "
        "--pipeline-model-parallel-comm-backend "
        "--load-main-params-from-ckpt --yaml-cfg --encoder-seq-length --decoder-seq-length "
        "--decoder-num-layers --is-hybrid-model --hybrid-override-pattern --lazy-mpu-init "
        "--fake-process-group --optimizer-cuda-graph --overlap-moe-expert-parallel-comm "
        "--vision-pretraining --logits-save-dir --logits-load-dir --freeze-all-layers "
        "--fine-grained-activation-offloading --cpu-offloading-num-layers "
        "--overlap-param-gather-with-optimizer-step --enable-ft-package "
        "--init-model-with-meta-device --ckpt-convert-format --attention-output-gate --replication "
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
        "passed on",
        "--te-rng-tracker --inference-rng-tracker --data-parallel-random-init",
        "random states; each replica its own with --data-parallel-random-init",
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
        "--refit-method --vocab-extra-ids --relative-attention-* --onnx-safe --sft-* "
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
    Support(
        "passed on",
        "--moe-router-load-balancing-type --moe-token-dispatcher-type --moe-router-dtype "
        "--moe-router-pre-softmax --moe-router-score-function --moe-router-topk-scaling-factor "
        "--moe-router-num-groups --moe-router-group-topk --moe-per-layer-logging "
        "--moe-input-jitter-eps --moe-apply-probs-on-input --moe-layer-recompute "
        "--moe-permute-fusion --moe-router-fusion --moe-router-force-*",
        "experts",
    ),
    Support(
        "refused",
        "--moe-layer-freq --moe-shared-expert-intermediate-size --moe-latent-size "
        "--moe-grouped-gemm --moe-router-enable-expert-bias --moe-expert-capacity-factor "
        "--moe-use-upcycling",
        "with --num-experts",
        asked_by="--num-experts",
    ),
    Support(
        "refused",
        "--expert-tensor-parallel-size --expert-tensor-parallel-num-weight-shards "
        "--moe-enable-routing-replay --moe-paged-stash --moe-routing-trace-path "
        "--save-tokens-per-expert-interval",
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
    ),
    Support(
        "elsewhere",
        "--fp8-* --fp4-* --num-layers-at-*-in-bf16 "
        "--keep-fp8-transpose-cache --te-precision-config-file --reuse-grad-buf-*",
        "details of fp4, which is refused, or of a way of fp8 that is",
    ),
    Support(
        "elsewhere",
        "--mamba-* --linear-* --disable-mamba-mem-eff-path --dsa-* --no-dsa-* --q-lora-rank "
        "--kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mla-* --mtp-* "
        "--rotary-scaling-factor --mscale --mscale-all-dim --kitchen-* --use-kitchen-attention "
        "--rope-type --qk-clip-* --hierarchical-context-parallel-sizes "
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
        "--main-params-dtype --tp-comm-* --no-tp-comm-* --wgrad-deferral-limit "
        "--logits-* --fim-* --inprocess-* "
        "--non-persistent-* --calc-ft-timeouts --ft-num-warmup-iters --ckpt-convert-*",
        "details of a feature that is refused",
    ),
    Support(
        "passed on",
        "--activation-func-clamp-value --apply-layernorm-1p --apply-query-key-layer-scaling "
        "--apply-residual-connection-post-layernorm --apply-wd-to-qk-layernorm "
        "--attention-backend --attention-softmax-in-fp32 "
        "--embedding-init-method-std --flash-attention-version --fused-residual-rmsnorm "
        "--glu-linear-offset --init-method-std --init-method-xavier-uniform "
        "--mlp-chunks-for-training --mrope-section --mup-attn-scale-power --mup-base-head-dim "
        "--mup-base-hidden-size --mup-embedding-mult --mup-output-mult --mup-width-mult "
        "--no-pad-vocab-size --no-position-embedding --no-rope-freq "
        "--no-yarn-correction-range-round-to-int --norm-epsilon --openai-gelu "
        "--padded-vocab-size --qk-l2-norm --quick-geglu --rope-scaling-factor --rotary-base "
        "--rotary-interleaved --rotary-percent --rotary-seq-len-interpolation-factor --spec "
        "--squared-relu --use-flash-attn --use-grouped-gemm-for-dense-mlp --use-mcore-models "
        "--use-mup --use-rope-scaling --use-rotary-position-embeddings "
        "--use-te-activation-func --use-transformer-engine-op-fuser --window-attn-skip-freq "
        "--window-size --yarn-beta-fast --yarn-beta-slow --yarn-correction-range-round-to-int "
        "--yarn-original-max-position-embeddings",
        "the model",
    ),
    Support(
        "passed on",
        "--accumulate-allreduce-grads-in-fp32 --checkpoint-activations --cp-comm-type "
        "--cross-entropy-fusion-impl --cross-entropy-loss-fusion --deterministic-mode "
        "--disable-bf16-reduced-precision-matmul --disable-jit-fuser "
        "--distribute-saved-activations --empty-unused-memory-level --enable-experimental "
        "--grad-reduce-in-bf16 --no-bias-dropout-fusion --no-bias-gelu-fusion "
        "--no-bias-swiglu-fusion --no-clone-scatter-output-in-embedding "
        "--no-gradient-accumulation-fusion --no-initialization --no-masked-softmax-fusion "
        "--no-persist-layer-norm --no-rope-fusion --no-stream-ckpt-dequant "
        "--local-rank --recompute-activations --recompute-modules --rerun-mode "
        "--loss-scale --min-loss-scale --fp16-lm-cross-entropy",
        "kernels and arithmetic",
    ),
    Support(
        "passed on",
        "--adam-beta1 --adam-beta2 --decoupled-lr --decoupled-min-lr "
        "--dump-param-to-param-group-map --end-weight-decay --lr-decay-iters "
        "--lr-decay-samples --lr-warmup-fraction --lr-warmup-init --lr-warmup-iters "
        "--lr-warmup-samples --lr-wsd-decay-iters --lr-wsd-decay-samples --lr-wsd-decay-style "
        "--min-lr --no-weight-decay-cond-type --sgd-momentum --start-weight-decay "
        "--use-checkpoint-opt_param-scheduler --warmup "
        "--weight-decay-incr-style",
        "the optimizer",
    ),
    Support(
        "passed on",
        "--allow-ambiguous-pad-tokens --data-args-path --dataloader-defer-npy-index-mmap "
        "--dataloader-fast-cache-load --disable-msc --enable-msc --merge-file "
        "--mid-level-dataset-surplus --mock-data --no-create-attention-mask-in-dataloader "
        "--no-mmap-bin-files --no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--no-use-tokenizer-model-from-checkpoint-args --null-tokenizer-eod-id "
        "--null-tokenizer-pad-id --num-dataset-builder-threads --object-storage-cache-path "
        "--per-split-data-args-path --reset-position-ids --skip-train --start-eval-at-iter "
        "--test-data-path --tiktoken-num-special-tokens --tiktoken-pattern "
        "--tokenizer-hf-no-include-special-tokens --tokenizer-hf-no-use-fast "
        "--tokenizer-metadata --tokenizer-model --tokenizer-sentencepiece-legacy "
        "--tokenizer-special-tokens --trust-remote-code --validation-set-names --vocab-file",
        "data and tokenizers",
    ),
    Support(
        "passed on",
        "--async-ckpt-cpu-priority --async-ckpt-io-priority --async-ckpt-use-cpu-shm "
        "--async-save --async-strategy --auto-detect-ckpt-format "
        "--ckpt-assume-constant-structure --ckpt-fully-parallel-load "
        "--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-process-group "
        "--ckpt-fully-parallel-save --ckpt-fully-parallel-save-process-group --ckpt-step "
        "--dist-ckpt-format --dist-ckpt-optim-fully-reshardable "
        "--dist-ckpt-save-pre-mcore-014 --dist-ckpt-strictness --dist-ckpt-workers "
        "--distrib-optim-fully-reshardable-mem-efficient --no-ckpt-fully-parallel-save "
        "--no-ckpt-load-validate-sharding-integrity --override-ckpt-iteration "
        "--save-retain-interval --use-checkpoint-args --use-dist-ckpt "
        "--use-persistent-ckpt-worker --verify-integrity",
        "checkpoints",
    ),
    Support(
        "passed on",
        "--adlr-autoresume --adlr-autoresume-interval --app-tag-run-name "
        "--app-tag-run-version --check-for-large-grads --check-for-spiky-loss "
        "--config-logger-dir --disable-gloo-process-groups --error-injection-rate "
        "--error-injection-type --exit-signal --exit-signal-handler-for-dataloader "
        "--exit-signal-handler-for-training --fault-injector-delay-start-iteration "
        "--fault-injector-fault-delay --fault-injector-fault-probabilities "
        "--fault-injector-fault-types --fault-injector-mtti-seconds "
        "--fault-injector-num-ranks --fault-injector-offset-seconds --fault-injector-ranks "
        "--fault-injector-seed --flight-recorder-dump-path "
        "--flight-recorder-include-stack-trace --flight-recorder-trace-buffer-size "
        "--gpu-sniff-test-interval --log-device-memory-used --log-energy "
        "--log-memory-interval --log-memory-to-tensorboard --log-progress --log-throughput "
        "--log-timers-to-tensorboard --log-validation-ppl-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --log-world-size-to-tensorboard --logging-level "
        "--manual-gc --manual-gc-interval "
        "--memory-snapshot-path --no-barrier-with-level-1-timing "
        "--no-check-for-nan-in-loss-and-grad --no-flight-recorder-dump-on-timeout "
        "--no-flight-recorder-extra-dump-on-exec --no-flight-recorder-include-only-active "
        "--no-manual-gc-eval --no-one-logger --nvtx-ranges --one-logger-async "
        "--one-logger-project --one-logger-run-name --profile --profile-ranks "
        "--profile-step-end --profile-step-start --pytorch-profiler-collect-callstack "
        "--pytorch-profiler-collect-chakra --pytorch-profiler-collect-shapes "
        "--record-memory-history --record-shapes --result-rejected-tracker-filename "
        "--tensorboard-dir --tensorboard-log-interval --tensorboard-queue-size "
        "--timing-log-level --timing-log-option --train-sync-interval --use-pytorch-profiler "
        "--wandb-entity --wandb-exp-name --wandb-project --wandb-save-dir",
        "logs and watching a job",
    ),
)
