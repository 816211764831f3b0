"""Treatment of each Megatron flag in `verify`, as data (`flags.support.verification` reads it).

The first entry that names a flag decides. An entry with `values` holds for these values only. A
flag that no entry names follows from its status in `flags.support.table` (`OF_STATUS`); for a
status without such a rule (flags that a plan follows), a test demands an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_hetero.flags.support.kinds import Status

Treatment = Literal[
    "kept", "kept by the plan", "kept in half precision", "shrunk", "no effect", "left out",
    "refused",
]  # fmt: skip
"""Kept: given to the plan's ranks and the one process as it stands; by the plan: to its ranks
alone, since it says how ranks work together; in half precision: to both in bf16 or fp16.  Shrunk:
another value is used, and both are shown.  Left out: a CPU cannot run it.  Refused: as the runtime
does, or because nothing could be compared."""


@dataclass(frozen=True)
class Entry:
    """Treatment of some flags and patterns (`names`, with `*`); `note` is the class or reason."""

    treatment: Treatment
    names: str
    note: str = ""
    values: tuple[str, ...] = ()


OF_STATUS: dict[Status, Entry] = {
    "the plan's": Entry("kept by the plan", "", "the plan says it"),
    "refused": Entry("refused", "", "verify cannot train such a job"),
    "elsewhere": Entry("no effect", "", "another kind of job, or a feature that is not used"),
}

_KERNELS = "kernels of Transformer Engine or of another library for GPUs"
_FP8 = "fp8 products need Transformer Engine and a GPU"
FP8 = "fp8 products with a scale for each tensor"
"""Note of flags that are kept only where the layers and the small model's sizes have them."""
_OVERLAP = "communication overlap and transports of GPUs"
_GRAPHS = "CUDA graphs"
_OFFLOAD = "memory of GPUs that is moved to the host"
CPU_CANNOT_RUN = (_KERNELS, _FP8, _OVERLAP, _GRAPHS, _OFFLOAD)
"""The only reasons for which a flag is left out."""

_LOG = "logs, profiles and watching a job"
_CHECKPOINTS = "checkpoints: every run starts from one of the small model"
_DATA = "data and tokenizers: every run reads text as bytes"
_VALIDATION = "validation"
_MACHINE = "where processes run and how they are started, stopped and kept"

TABLE: tuple[Entry, ...] = (
    # What the shape of the small model, its data or so few steps replace.
    Entry(
        "shrunk",
        "--num-layers --encoder-num-layers --hidden-size --ffn-hidden-size "
        "--num-attention-heads --num-query-groups --kv-channels --seq-length --encoder-seq-length "
        "--max-position-embeddings --num-experts --moe-router-topk --moe-ffn-hidden-size "
        "--moe-router-num-groups --moe-router-group-topk --moe-shared-expert-intermediate-size "
        "--moe-layer-freq --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim "
        "--v-head-dim --recompute-num-layers --window-size "
        "--yarn-original-max-position-embeddings --mup-base-hidden-size --mup-base-head-dim "
        "--mrope-section --mtp-num-layers",
        "the size of the model",
    ),
    Entry(
        "shrunk",
        "--vocab-size --make-vocab-size-divisible-by --padded-vocab-size --no-pad-vocab-size",
        "the vocabulary: bytes of text",
    ),
    Entry(
        "shrunk",
        "--micro-batch-size --global-batch-size --batch-size --step-batch-size-schedule",
        "the batch is the plan's in every step",
    ),
    Entry(
        "shrunk",
        "--train-iters --train-samples --lr-decay-iters --lr-decay-samples --lr-warmup-iters "
        "--lr-warmup-samples --lr-wsd-decay-iters --lr-wsd-decay-samples --exit-interval "
        "--phase-transition-iterations",
        "the number of steps",
    ),
    Entry("shrunk", "--lr --optimizer", "of the job's optimizer; the other has its own rate"),
    Entry(
        "shrunk",
        "--hidden-dropout --attention-dropout --moe-input-jitter-eps --moe-router-force-*",
        "random numbers differ under every division of a job",
    ),
    Entry(
        "shrunk",
        "--initial-loss-scale --loss-scale --min-loss-scale --loss-scale-window --hysteresis",
        "so that so few steps see the scale move",
    ),
    Entry(
        "shrunk",
        "--data-path --train-data-path --mock-data --split --tokenizer-type --fim-data --sft",
        _DATA,
    ),
    Entry("shrunk", "--distributed-backend", "a CPU has gloo"),
    # What a CPU cannot run.
    Entry("kept", "--transformer-impl", values=("local", "transformer_engine")),
    Entry("kept", "--attention-backend", values=("auto", "local", "unfused", "fused")),
    Entry("kept", "--cross-entropy-fusion-impl", values=("native",)),
    Entry("kept", "--moe-token-dispatcher-type", values=("allgather", "alltoall")),
    Entry(
        "left out",
        "--transformer-impl --attention-backend --flash-attention-version --use-flash-attn "
        "--cross-entropy-fusion-impl --fused-residual-rmsnorm --use-te-activation-func "
        "--use-transformer-engine-op-fuser --use-grouped-gemm-for-dense-mlp --te-rng-tracker "
        "--inference-rng-tracker --moe-permute-fusion --moe-router-fusion "
        "--apply-layernorm-1p --moe-shared-expert-overlap --use-grouped-gemm-for-shared-expert "
        "--mla-down-proj-fusion "
        "--moe-token-dispatcher-type --use-fused-weighted-squared-relu --deterministic-mode "
        "--use-precision-aware-optimizer --exp-avg-dtype --exp-avg-sq-dtype --main-grads-dtype "
        "--main-params-dtype --te-precision-config-file --use-kitchen-attention "
        "--moe-enable-deepep --fp32-residual-connection --qk-clip --qk-clip-*",
        _KERNELS,
    ),
    Entry(
        "kept in half precision",
        "--fp8-format --fp8-recipe --fp8-margin --fp8-amax-history-len --fp8-amax-compute-algo "
        "--no-fp8-wgrad",
        FP8,
    ),
    Entry("left out", "--fp8-* --first-last-layers-bf16", _FP8),
    Entry("left out", "--num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16", _FP8),
    Entry(
        "left out",
        "--tp-comm-* --no-tp-comm-* --use-nccl-ub --use-sharp --sharp-enabled-group "
        "--nccl-communicator-config-path --high-priority-* --pipeline-model-parallel-comm-backend "
        "--use-ring-exchange-p2p --disable-symmetric-registration --delay-wgrad-compute "
        "--overlap-moe-expert-parallel-comm --create-all-gather-group "
        "--ddp-reduce-scatter-with-fp32-accumulation",
        _OVERLAP,
    ),
    Entry("left out", "--cuda-graph-* --enable-cuda-graph --external-cuda-graph", _GRAPHS),
    Entry("left out", "--optimizer-cuda-graph", _GRAPHS),
    Entry(
        "left out",
        "--optimizer-cpu-offload --optimizer-offload-fraction --cpu-offloading-* "
        "--fine-grained-activation-offloading --fine-grained-offloading-* --offload-modules "
        "--overlap-cpu-optimizer-* --use-torch-optimizer-for-cpu-offload --no-pin-cpu-*",
        _OFFLOAD,
    ),
    # What both train with.
    Entry(
        "kept",
        "--group-query-attention --normalization --position-embedding-type --swiglu "
        "--untie-embeddings-and-output-weights --disable-bias-linear --add-qkv-bias "
        "--qk-layernorm --activation-func-clamp-value "
        "--apply-query-key-layer-scaling --apply-residual-connection-post-layernorm "
        "--apply-wd-to-qk-layernorm --attention-softmax-in-fp32 --embedding-init-method-std "
        "--glu-linear-offset --init-method-std --init-method-xavier-uniform "
        "--mlp-chunks-for-training --mup-attn-scale-power --mup-embedding-mult "
        "--mup-output-mult --mup-width-mult --use-mup --no-position-embedding --no-rope-freq "
        "--norm-epsilon --openai-gelu --qk-l2-norm --quick-geglu --rope-scaling-factor "
        "--rotary-base --rotary-interleaved --rotary-percent "
        "--rotary-seq-len-interpolation-factor --rotary-scaling-factor --mscale --mscale-all-dim "
        "--squared-relu --use-mcore-models "
        "--use-rope-scaling --use-rotary-position-embeddings --window-attn-skip-freq "
        "--yarn-beta-fast --yarn-beta-slow --yarn-correction-range-round-to-int "
        "--no-yarn-correction-range-round-to-int --softmax-type "
        "--multi-latent-attention --rope-type --attention-output-gate --is-hybrid-model "
        "--mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads "
        "--decoder-seq-length --decoder-num-layers",
        "the model",
    ),
    Entry(
        "kept",
        "--moe-aux-loss-coeff --moe-z-loss-coeff --moe-router-load-balancing-type "
        "--moe-router-dtype --moe-router-pre-softmax --moe-router-score-function "
        "--moe-router-topk-scaling-factor --moe-apply-probs-on-input --moe-layer-recompute "
        "--moe-shared-expert-gate "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate "
        "--moe-expert-capacity-factor --moe-token-drop-policy --moe-grouped-gemm",
        "experts",
    ),
    Entry(
        "kept",
        "--recompute-granularity --recompute-method --recompute-activations --recompute-modules "
        "--checkpoint-activations --sequence-parallel --calculate-per-token-loss "
        "--disable-jit-fuser --enable-experimental "
        "--no-bias-dropout-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
        "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion "
        "--no-clone-scatter-output-in-embedding --no-gradient-accumulation-fusion",
        "how it is computed",
    ),
    Entry(
        "kept",
        "--weight-decay --clip-grad --adam-eps --adam-beta1 --adam-beta2 --sgd-momentum "
        "--decoupled-lr --decoupled-min-lr --min-lr --lr-decay-style --lr-warmup-fraction "
        "--lr-warmup-init --warmup --lr-wsd-decay-style --start-weight-decay --end-weight-decay "
        "--weight-decay-incr-style --no-weight-decay-cond-type --seed",
        "the optimizer",
    ),
    Entry(
        "kept",
        "--eod-mask-loss --reset-position-ids --reset-attention-mask --dataloader-type "
        "--no-create-attention-mask-in-dataloader --dataloader-inter-document-masking",
        "how text becomes batches",
    ),
    Entry(
        "kept in half precision",
        "--bf16 --fp16 --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 "
        "--fp16-lm-cross-entropy --disable-bf16-reduced-precision-matmul",
        "precision",
    ),
    Entry(
        "kept in half precision",
        "--cross-entropy-loss-fusion",
        "it rounds the gradient of the logits to bf16, in fp32 too",
    ),
    Entry(
        "kept by the plan",
        "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather "
        "--no-align-grad-reduce --no-align-param-gather --no-gradient-reduce-div-fusion "
        "--num-distributed-optimizer-instances --ddp-bucket-size --ddp-num-buckets "
        "--ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw "
        "--ddp-param-name-patterns-for-fp32-local-accumulation "
        "--suggested-communication-unit-size --overlap-param-gather-with-optimizer-step "
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit --cp-comm-type "
        "--distribute-saved-activations --no-overlap-p2p-communication "
        "--overlap-p2p-communication-warmup-flush --no-data-sharding "
        "--microbatch-group-size-per-virtual-pipeline-stage "
        "--use-same-sampling-seed-across-dp-ranks --decrease-batch-size-if-needed",
        "how ranks work together",
    ),
    # What changes no number of a step.
    Entry(
        "no effect",
        "--data-cache-path --num-workers --valid-data-path --test-data-path --data-args-path "
        "--per-split-data-args-path --allow-ambiguous-pad-tokens --dataloader-defer-* "
        "--dataloader-fast-cache-load --disable-msc --enable-msc --merge-file --vocab-file "
        "--mid-level-dataset-surplus --no-mmap-bin-files --null-tokenizer-* "
        "--no-use-tokenizer-model-from-checkpoint-args --num-dataset-builder-threads "
        "--object-storage-cache-path --tiktoken-* --tokenizer-* --no-tokenizer-* "
        "--trust-remote-code --per-dataset-sequences-path --fim-* --sft-*",
        _DATA,
    ),
    Entry(
        "no effect",
        "--eval-iters --eval-interval --full-validation --multiple-validation-sets "
        "--start-eval-at-iter --validation-set-names --eval-global-batch-size "
        "--eval-micro-batch-size",
        _VALIDATION,
    ),
    Entry(
        "no effect",
        "--save --save-interval --save-retain-interval --save-params-interval "
        "--save-*grads-interval --save-activations-interval --save-tokens-per-expert-interval "
        "--load --finetune --no-load-* --no-save-* --exit-on-missing-checkpoint --ckpt-* "
        "--no-ckpt-* --async-* --auto-detect-ckpt-format --dist-ckpt-* --distrib-optim-* "
        "--override-ckpt-iteration --override-opt_param-scheduler "
        "--use-checkpoint-opt_param-scheduler --use-dist-ckpt --use-persistent-ckpt-worker "
        "--verify-integrity --non-persistent-* --no-stream-ckpt-dequant --no-initialization "
        "--data-parallel-random-init --use-cpu-initialization "
        "--use-mp-args-from-checkpoint-args --load-main-params-from-ckpt",
        _CHECKPOINTS,
    ),
    Entry(
        "no effect",
        "--log-* --no-log-* --timing-log-* --tensorboard-* --wandb-* --profile "
        "--profile-* --use-pytorch-profiler --pytorch-profiler-* --record-* --nvtx-ranges "
        "--memory-snapshot-path --config-logger-dir --logging-level --no-one-logger "
        "--one-logger-* --app-tag-* --moe-per-layer-logging --dump-param-to-param-group-map "
        "--straggler-* --disable-straggler-on-startup --check-for-* "
        "--no-check-for-nan-in-loss-and-grad --check-weight-hash-* --gpu-sniff-test-interval "
        "--flight-recorder-* --no-flight-recorder-* --no-barrier-with-level-1-timing "
        "--result-rejected-tracker-filename --rerun-mode --moe-routing-trace-* "
        "--moe-enable-routing-replay "
        "--run-workload-inspector-server",
        _LOG,
    ),
    Entry(
        "no effect",
        "--adlr-autoresume --adlr-autoresume-interval --exit-duration-in-mins "
        "--exit-signal --exit-signal-* --distributed-timeout-* --disable-gloo-process-groups "
        "--local-rank --manual-gc --manual-gc-interval --no-manual-gc-eval "
        "--train-sync-interval --empty-unused-memory-level --enable-ft-package "
        "--calc-ft-timeouts --ft-num-warmup-iters --replication",
        _MACHINE,
    ),
    Entry(
        "refused",
        "--error-injection-* --fault-injector-*",
        "it makes faults, which a comparison would find",
    ),
    Entry("refused", "--iterations-to-skip", "a step that is left out has nothing to compare"),
    Entry("refused", "--heterogeneous-layers-config-*", "layers of unlike shape are not shrunk"),
    Entry("refused", "--skip-train", "a job that does not train has nothing to compare"),
    Entry("refused", "--spec", "it imports the module that it names"),
    Entry("refused", "--use-checkpoint-args", "the model is that of a checkpoint"),
)
