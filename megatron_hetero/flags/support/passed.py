"""Flags that Megatron's own code follows on a plan (part of `flags.support.table`).

A test shows that they act as in one process, or the entry says why plans cannot differ by them.
"""

from __future__ import annotations

from megatron_hetero.flags.support.kinds import Support
from megatron_hetero.model.megatron_release import MEGATRON

FOLLOWED: tuple[Support, ...] = (
    Support(
        "proved",
        "--activation-func-clamp-value --adam-beta1 --adam-beta2 --apply-wd-to-qk-layernorm "
        "--decoupled-lr --decoupled-min-lr --embedding-init-method-std --end-weight-decay "
        "--glu-linear-offset --init-method-std --lr-decay-iters --lr-warmup-fraction "
        "--lr-warmup-init --lr-warmup-iters --lr-wsd-decay-style --min-lr "
        "--mup-attn-scale-power --mup-base-head-dim --mup-base-hidden-size "
        "--mup-embedding-mult --mup-output-mult --no-rope-freq --norm-epsilon "
        "--padded-vocab-size --quick-geglu --reset-position-ids --rotary-base "
        "--rotary-interleaved --rotary-percent --rotary-seq-len-interpolation-factor "
        "--sgd-momentum --squared-relu --start-weight-decay --use-mup --use-rope-scaling "
        "--use-rotary-position-embeddings --weight-decay-incr-style --window-attn-skip-freq "
        "--window-size --lr-decay-samples --lr-warmup-samples --lr-wsd-decay-iters "
        "--lr-wsd-decay-samples --moe-apply-probs-on-input --moe-router-group-topk "
        "--moe-router-load-balancing-type --moe-router-num-groups --moe-router-pre-softmax "
        "--moe-router-score-function --moe-router-topk-scaling-factor --mscale --mscale-all-dim "
        "--no-weight-decay-cond-type --no-yarn-correction-range-round-to-int "
        "--null-tokenizer-eod-id --null-tokenizer-pad-id --qk-l2-norm --rotary-scaling-factor "
        "--spec --yarn-beta-fast --yarn-beta-slow --yarn-correction-range-round-to-int "
        "--yarn-original-max-position-embeddings --multi-latent-attention --q-lora-rank "
        "--kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rope-type "
        "--attention-output-gate --softmax-type --moe-layer-freq "
        "--moe-shared-expert-intermediate-size "
        "--moe-shared-expert-gate --moe-router-enable-expert-bias --moe-router-bias-update-rate "
        "--moe-expert-capacity-factor --moe-token-drop-policy --iterations-to-skip "
        "--reset-attention-mask --is-hybrid-model --mtp-num-layers --mtp-loss-scaling-factor "
        "--mtp-use-repeated-layer --mtp-detach-heads --encoder-seq-length "
        "--moe-routing-trace-path --moe-routing-trace-max-training-iters "
        "--heterogeneous-layers-config-path",
        "shown to act as in one process (tests/runtime/flag_effects.py)",
    ),
    Support(
        "proved",
        "--ckpt-step --loss-scale --min-loss-scale "
        "--no-check-for-nan-in-loss-and-grad --override-ckpt-iteration --save-retain-interval "
        "--start-eval-at-iter --test-data-path --use-checkpoint-args "
        "--use-checkpoint-opt_param-scheduler --verify-integrity --log-progress --data-args-path "
        "--per-split-data-args-path",
        "shown to act as in one process (tests/runtime/test_flag_files.py)",
    ),
    Support(
        "proved",
        "--check-for-spiky-loss --skip-train --use-pytorch-profiler "
        "--eval-global-batch-size --moe-token-dispatcher-type --moe-grouped-gemm --profile "
        "--profile-ranks --profile-step-end --profile-step-start --tensorboard-dir --mock-data",
        "compared with one process, or shown on a plan",
    ),
    Support(
        "proved",
        "--sft --sft-tokenizer-prompt-format --dataloader-inter-document-masking --fim-data "
        "--fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix "
        "--fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token "
        "--eval-micro-batch-size --phase-transition-iterations",
        "shown to read and train as one process (tests/runtime/test_packed_data.py)",
    ),
    Support(
        "proved",
        "--save-params-interval --save-wgrads-interval --save-dgrads-interval "
        "--save-activations-interval --check-weight-hash-across-dp-replicas-interval "
        "--non-persistent-ckpt-type --non-persistent-save-interval "
        "--non-persistent-global-ckpt-dir --ckpt-convert-format --ckpt-convert-save",
        "shown to write what one process does (tests/runtime/test_dumps.py)",
    ),
    Support(
        "proved",
        "--qk-clip --qk-clip-alpha --qk-clip-threshold --log-max-attention-logit",
        "shown to clip and report as one process (tests/runtime/test_attention_logits.py)",
    ),
    Support(
        "proved",
        "--enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters",
        "every rank shown to tell its monitor what one process does "
        "(tests/runtime/test_rank_monitor.py)",
    ),
    Support(
        "refused",
        "--adlr-autoresume --checkpoint-activations --no-pad-vocab-size --warmup "
        "--freeze-all-layers --lazy-mpu-init --heterogeneous-layers-config-encoded-json",
        "Megatron itself fails, leaves, or does not do it",
        by_presence=True,
    ),
    Support(
        "proved",
        "--data-parallel-random-init",
        "each replica draws dropout of its own; all start from the same weights",
    ),
    Support(
        "proved",
        "--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --fp32-residual-connection",
        "in half precision, within its rounding",
    ),
    Support(
        "refused",
        "--config-logger-dir --init-method-xavier-uniform",
        f"{MEGATRON} fails at it",
    ),
    Support(
        "passed on",
        "--adlr-autoresume-interval --apply-residual-connection-post-layernorm "
        "--ckpt-fully-parallel-save --disable-msc --dist-ckpt-format "
        "--dist-ckpt-save-pre-mcore-014 --exit-signal-handler-for-dataloader "
        "--fp16-lm-cross-entropy --no-position-embedding --mup-width-mult "
        "--openai-gelu --rope-scaling-factor "
        "--use-dist-ckpt --use-flash-attn --use-mcore-models --decoder-seq-length "
        "--decoder-num-layers --moe-enable-routing-replay",
        neutral="unread",
    ),
    Support(
        "passed on",
        "--attention-backend --attention-softmax-in-fp32 --cp-comm-type "
        "--cross-entropy-fusion-impl "
        "--apply-query-key-layer-scaling --deterministic-mode --disable-jit-fuser "
        "--enable-experimental --mlp-chunks-for-training "
        "--no-bias-dropout-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
        "--no-clone-scatter-output-in-embedding --no-gradient-accumulation-fusion "
        "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --manual-gc "
        "--manual-gc-interval --no-manual-gc-eval --moe-layer-recompute --recompute-activations "
        "--recompute-modules --moe-router-dtype --no-create-attention-mask-in-dataloader",
        neutral="kernels",
    ),
    Support(
        "passed on",
        "--apply-layernorm-1p --local-rank "
        "--disable-bf16-reduced-precision-matmul --empty-unused-memory-level "
        "--flash-attention-version --fused-residual-rmsnorm --gpu-sniff-test-interval "
        "--train-sync-interval --use-grouped-gemm-for-dense-mlp --use-te-activation-func "
        "--use-transformer-engine-op-fuser --moe-permute-fusion --moe-router-fusion "
        "--moe-shared-expert-overlap --mla-down-proj-fusion "
        "--te-rng-tracker --inference-rng-tracker --no-stream-ckpt-dequant "
        "--save-tokens-per-expert-interval "
        "--mrope-section",
        "untested, as everything on GPUs",
        neutral="GPU",
    ),
    Support(
        "passed on",
        "--tp-comm-overlap --tp-comm-overlap-* --no-tp-comm-overlap-* --no-tp-comm-bulk-* "
        "--tp-comm-bootstrap-backend",
        "with Transformer Engine's layers in bf16, equal shares, and each tensor-parallel group on "
        "one machine; a stage of one GPU has nothing to exchange. Untested, as everything on GPUs",
        neutral="GPU",
    ),
    Support(
        "passed on",
        "--no-tp-comm-split-* --tp-comm-*",
        "names of Transformer Engine before 1.6",
        neutral="unread",
    ),
    Support(
        "passed on",
        "--cross-entropy-loss-fusion",
        "it rounds the gradient of the logits to bf16: nothing in bf16, a rounding in fp32",
        neutral="kernels",
    ),
    Support(
        "passed on",
        "--allow-ambiguous-pad-tokens "
        "--dataloader-defer-npy-index-mmap --dataloader-fast-cache-load --enable-msc "
        "--merge-file --per-dataset-sequences-path --mid-level-dataset-surplus --no-mmap-bin-files "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--no-use-tokenizer-model-from-checkpoint-args "
        "--num-dataset-builder-threads --object-storage-cache-path "
        "--tiktoken-num-special-tokens --tiktoken-pattern "
        "--tokenizer-hf-no-include-special-tokens --tokenizer-hf-no-use-fast "
        "--tokenizer-metadata --tokenizer-model --tokenizer-sentencepiece-legacy "
        "--tokenizer-special-tokens --trust-remote-code --validation-set-names --vocab-file",
        neutral="reading",
    ),
    Support(
        "passed on",
        "--async-ckpt-cpu-priority --async-ckpt-io-priority --async-ckpt-use-cpu-shm "
        "--async-save --async-strategy --auto-detect-ckpt-format "
        "--ckpt-assume-constant-structure --ckpt-fully-parallel-load "
        "--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-process-group "
        "--ckpt-fully-parallel-save-process-group --dist-ckpt-workers "
        "--no-ckpt-fully-parallel-save "
        "--no-ckpt-load-validate-sharding-integrity --use-persistent-ckpt-worker "
        "--disable-gloo-process-groups",
        neutral="writing",
    ),
    Support(
        "passed on",
        "--error-injection-rate --error-injection-type --exit-signal "
        "--exit-signal-handler-for-training --fault-injector-* "
        "--check-for-large-grads --rerun-mode",
        neutral="end",
    ),
    Support(
        "passed on",
        "--app-tag-run-name --app-tag-run-version "
        "--dump-param-to-param-group-map --flight-recorder-* --no-flight-recorder-* "
        "--log-device-memory-used --log-energy --log-memory-interval "
        "--log-memory-to-tensorboard --log-throughput "
        "--log-timers-to-tensorboard --log-validation-ppl-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --log-world-size-to-tensorboard --logging-level "
        "--memory-snapshot-path --moe-per-layer-logging --no-barrier-with-level-1-timing "
        "--no-one-logger --nvtx-ranges --one-logger-async --one-logger-project "
        "--one-logger-run-name --pytorch-profiler-collect-callstack "
        "--pytorch-profiler-collect-chakra --pytorch-profiler-collect-shapes "
        "--record-memory-history --record-shapes --result-rejected-tracker-filename "
        "--tensorboard-log-interval --tensorboard-queue-size --timing-log-level "
        "--timing-log-option --wandb-entity --wandb-exp-name --wandb-project --wandb-save-dir",
        neutral="log",
    ),
)
