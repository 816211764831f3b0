"""Every flag that is passed on and can change numbers, with a setting in which it does.

`test_flag_effects` runs each on a plan and in one process, and in one process without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROPE = ("--position-embedding-type=rope",)
SWIGLU = ("--swiglu",)
EXPERTS = (
    "--num-experts=4", "--moe-router-topk=2", "--sequence-parallel", "--disable-bias-linear",
    "--moe-aux-loss-coeff=0.5",
)  # fmt: skip
LATENT = (
    "--multi-latent-attention", "--q-lora-rank=16", "--kv-lora-rank=16", "--qk-head-dim=8",
    "--qk-pos-emb-head-dim=4", "--v-head-dim=12", "--rope-type=rope", "--normalization=RMSNorm",
    "--init-method-std=0.2",
)  # fmt: skip
BIASED = (
    "--moe-router-score-function=sigmoid", "--moe-router-enable-expert-bias", "--train-iters=4",
)  # fmt: skip
UNLIKE_LAYERS = Path(__file__).parent / "unlike_layers.json"
"""Layers with other columns, without attention or without an MLP, as Llama-Nemotron has them."""
NEMOTRON = (
    *ROPE, *SWIGLU, "--normalization=RMSNorm", "--group-query-attention", "--num-query-groups=2",
    "--use-rope-scaling", "--use-rotary-position-embeddings", "--rope-scaling-factor=8",
    "--rotary-base=10000", "--untie-embeddings-and-output-weights", "--disable-bias-linear",
)  # fmt: skip
MTP = (*ROPE, "--mtp-num-layers=1")
CAPACITY = ("--moe-expert-capacity-factor=0.6",)


YARN = (
    "--position-embedding-type=yarn", "--rotary-scaling-factor=4", "--init-method-std=0.3",
    "--yarn-original-max-position-embeddings=64", "--yarn-beta-fast=2", "--yarn-beta-slow=0.5",
    "--rotary-base=10",
)  # fmt: skip
WSD = ("--lr-decay-style=WSD",)
SAMPLES = ("--train-samples=24",)


@dataclass(frozen=True)
class Effect:
    """`flags` beside `context` change what is trained; `context` alone is what they change."""

    flags: tuple[str, ...]
    context: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The flag that is shown: the first."""
        return self.flags[0].partition("=")[0]


def _effect(flags: str, *context: tuple[str, ...] | str) -> Effect:
    words = [w for c in context for w in (c.split() if isinstance(c, str) else c)]
    return Effect(tuple(flags.split()), tuple(words))


EFFECTS: tuple[Effect, ...] = (
    _effect("--activation-func-clamp-value=0.01", SWIGLU),
    _effect("--apply-wd-to-qk-layernorm", "--qk-layernorm --weight-decay=0.9 --train-iters=4"),
    _effect("--embedding-init-method-std=0.2"),
    _effect("--glu-linear-offset=1.0", SWIGLU),
    _effect("--init-method-std=0.1"),
    _effect("--no-rope-freq=2", ROPE),
    _effect("--norm-epsilon=0.1"),
    _effect("--quick-geglu"),
    _effect("--squared-relu"),
    _effect("--use-rope-scaling", ROPE,
            "--init-method-std=0.3 --rotary-base=1000000 --rope-scaling-factor=1e-3"),
    _effect("--rotary-base=100", ROPE),
    _effect("--rotary-interleaved", ROPE),
    _effect("--rotary-percent=0.5", ROPE),
    _effect("--rotary-seq-len-interpolation-factor=2", ROPE),
    _effect("--use-rotary-position-embeddings"),
    _effect("--window-size=4,0"),
    _effect("--window-attn-skip-freq=2", "--window-size=4,0"),
    _effect("--use-mup --mup-base-hidden-size=16"),
    _effect("--mup-base-hidden-size=8", "--use-mup"),
    _effect("--mup-embedding-mult=3", "--use-mup --mup-base-hidden-size=16"),
    _effect("--mup-output-mult=3", "--use-mup --mup-base-hidden-size=16"),
    _effect("--mup-base-head-dim=4",
            "--use-mup --mup-base-hidden-size=16 --init-method-std=0.3"),
    _effect("--mup-attn-scale-power=0.5",
            "--use-mup --mup-base-hidden-size=16 --init-method-std=0.3"),
    _effect("--padded-vocab-size=160"),
    _effect("--adam-beta1=0.5", "--train-iters=4"),
    _effect("--adam-beta2=0.5", "--train-iters=4"),
    _effect("--decoupled-lr=0.1"),
    _effect("--decoupled-min-lr=0.05", "--decoupled-lr=0.1 --lr-decay-style=linear"),
    _effect("--start-weight-decay=0 --end-weight-decay=0.9 --weight-decay-incr-style=linear"),
    _effect("--lr-decay-iters=2", "--lr-decay-style=linear --train-iters=4"),
    _effect("--lr-warmup-fraction=0.9"),
    _effect("--lr-warmup-init=1e-3", "--lr-warmup-iters=2"),
    _effect("--lr-warmup-iters=2"),
    _effect("--lr-wsd-decay-style=linear", "--lr-decay-style=WSD --lr-wsd-decay-iters=3"),
    _effect("--min-lr=8e-3", "--lr-decay-style=linear"),
    _effect("--iterations-to-skip 2", "--train-iters=4"),
    _effect("--sgd-momentum=0.1", "--optimizer=sgd"),
    _effect("--reset-position-ids", "--null-tokenizer-eod-id=7"),
    _effect("--reset-attention-mask", "--null-tokenizer-eod-id=7 --init-method-std=0.3"),
    _effect("--null-tokenizer-eod-id=7", "--eod-mask-loss"),
    _effect("--null-tokenizer-pad-id=5"),
    _effect("--no-weight-decay-cond-type=apply_wd_to_qk_layernorm",
            "--qk-layernorm --weight-decay=0.9 --train-iters=4"),
    _effect("--spec tests.runtime.own_layers without_a_norm"),
    _effect("--lr-wsd-decay-iters=3", WSD, "--lr-wsd-decay-iters=1 --train-iters=4"),
    _effect("--lr-decay-samples=12", SAMPLES, "--lr-decay-style=linear"),
    _effect("--lr-warmup-samples=12", SAMPLES),
    _effect("--lr-wsd-decay-samples=18", SAMPLES, WSD, "--lr-wsd-decay-samples=6"),
    _effect("--rotary-scaling-factor=16", YARN),
    _effect("--yarn-original-max-position-embeddings=16", YARN),
    _effect("--yarn-beta-fast=8", YARN),
    _effect("--yarn-beta-slow=0.05", YARN),
    _effect("--no-yarn-correction-range-round-to-int", YARN),
    _effect("--yarn-correction-range-round-to-int", YARN,
            "--no-yarn-correction-range-round-to-int"),
    _effect("--mscale=3", YARN),
    _effect("--mscale-all-dim=1", YARN),
    _effect("--moe-router-load-balancing-type=none", EXPERTS),
    _effect("--moe-router-load-balancing-type=sinkhorn", EXPERTS, "--moe-aux-loss-coeff=0"),
    _effect("--moe-router-pre-softmax", EXPERTS),
    _effect("--moe-router-topk-scaling-factor=2.5", EXPERTS, "--moe-router-pre-softmax"),
    _effect("--moe-router-score-function=sigmoid", EXPERTS),
    _effect("--moe-router-num-groups=2 --moe-router-group-topk=1", EXPERTS),
    _effect("--moe-apply-probs-on-input", EXPERTS,
            "--moe-router-topk=1 --moe-router-pre-softmax"),
    _effect("--qk-l2-norm", EXPERTS),
    _effect("--moe-layer-freq=2", EXPERTS),
    _effect("--moe-layer-freq=[0]*2+[1]*2", EXPERTS),
    _effect("--moe-shared-expert-intermediate-size=32", EXPERTS),
    _effect("--moe-shared-expert-gate", EXPERTS, "--moe-shared-expert-intermediate-size=32"),
    _effect("--moe-router-enable-expert-bias", EXPERTS, BIASED[0], BIASED[2],
            "--moe-router-bias-update-rate=0.1"),
    _effect("--moe-router-bias-update-rate=0.2", EXPERTS, BIASED),
    _effect("--moe-expert-capacity-factor=0.6", EXPERTS),
    _effect("--moe-token-drop-policy=position", EXPERTS, CAPACITY),
    _effect(" ".join(LATENT)),
    _effect("--q-lora-rank=8", LATENT),
    _effect("--kv-lora-rank=8", LATENT),
    _effect("--qk-head-dim=4", LATENT),
    _effect("--qk-pos-emb-head-dim=8", LATENT),
    _effect("--v-head-dim=8", LATENT),
    _effect("--rope-type=yarn", LATENT, "--mscale=3 --rotary-scaling-factor=4"),
    _effect("--qk-layernorm --multi-latent-attention", LATENT),
    _effect("--attention-output-gate"),
    _effect("--softmax-type=off-by-one"),
    _effect("--softmax-type=learnable"),
    _effect("--is-hybrid-model"),
    _effect("--encoder-seq-length=8"),
    _effect("--mtp-num-layers=1", ROPE),
    _effect("--mtp-num-layers=2", ROPE, "--untie-embeddings-and-output-weights"),
    _effect("--mtp-num-layers=1", ROPE, EXPERTS, BIASED),
    _effect("--mtp-loss-scaling-factor=1.0", MTP),
    _effect("--mtp-use-repeated-layer", MTP, "--mtp-num-layers=2"),
    _effect("--mtp-detach-heads", MTP, "--untie-embeddings-and-output-weights"),
    Effect((f"--heterogeneous-layers-config-path={UNLIKE_LAYERS}",), NEMOTRON),
)  # fmt: skip
