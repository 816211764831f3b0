"""Megatron's flags to a `Workload`, with the defaults and derived values of Megatron 0.19.2.

Sources: `megatron/training/arguments.py` (`validate_args`) and `core_transformer_config_from_args`.
"""

from __future__ import annotations

from typing import Literal, cast

from megatron_hetero.model.arguments import JobText
from megatron_hetero.model.flag_reader import FlagReader
from megatron_hetero.model.kinds_of_layers import latent_attention, layers_with_experts
from megatron_hetero.model.spec import (
    MAX_LAYERS,
    ModelSpec,
    Workload,
)
from megatron_hetero.model.tokenizer import Vocabulary, vocabulary_of
from megatron_hetero.model.training_flags import SOFTMAXES, training_of

_UNSUPPORTED = {
    "--experimental-attention-variant": "an experimental attention variant",
    "--hybrid-layer-pattern": "a hybrid model",
    "--hybrid-override-pattern": "a hybrid model",
    "--heterogeneous-layers-config-path": "layers of unlike shape",
    "--heterogeneous-layers-config-encoded-json": "layers of unlike shape",
    "--moe-latent-size": "latent experts",
    "--encoder-num-layers": "an encoder (a GPT takes --num-layers)",
    "--padded-vocab-size": "a vocabulary padded by hand",
    "--no-pad-vocab-size": "a vocabulary without padding",
    "--disable-pad-vocab-size": "a vocabulary without padding",
    "--fp4-format": "fp4 training",
    "--rampup-batch-size": "a batch size that changes",
    "--use-torch-fsdp2": "FSDP",
    "--use-megatron-fsdp": "FSDP",
    "--yaml-cfg": "a YAML configuration in place of flags",
    "--use-checkpoint-args": "a model described by a checkpoint",
    "--hierarchical-context-parallel-sizes": "context parallelism in levels",
}
_NO_LONGER = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations, or --recompute-granularity",
}
"""Flags at which Megatron's `validate_args` ends the job, and those that it names instead."""
_REQUIRED = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--vocab-size",
    "--seq-length",
    "--max-position-embeddings",
    "--global-batch-size",
    "--micro-batch-size",
)
_WHY_REQUIRED = {"--vocab-size": "the tokenizer's flags and files here do not say it"}
_POSITION_EMBEDDINGS = ("learned_absolute", "rope", "yarn", "none")


def workload_from_arguments(job: JobText, is_planned: bool = True) -> Workload:
    """Build model and training from merged arguments (`model.arguments.merge_arguments`).

    `megatron_args` keeps the arguments that are known without running the script; `unread` names
    the others.

    Args:
        is_planned: refuse what the cost model does not know.
    Raises:
        ModelError: a flag is missing, malformed, or contradicts another.
        UnsupportedError: a flag asks for what cannot be planned yet.
    """
    flags, source = FlagReader(job, is_planned), job.source
    # What the cost model does not know is refused before anything else is read.
    for flag, what in _UNSUPPORTED.items():
        flags.refuse(flag, what)
    for flag, instead in _NO_LONGER.items():
        if flag in flags:
            flags.fail([flag], f"Megatron takes {flag} no longer; use {instead} instead")
    if flags.known_text("--cp-comm-type") == "a2a+p2p":
        flags.refuse("--cp-comm-type", "context parallelism in levels (a2a+p2p)")
    # A job may leave out --vocab-size where the tokenizer's own files give the number.
    vocabulary = None if "--vocab-size" in flags else vocabulary_of(flags)
    required = [_sequence_flag(flags) if f == "--seq-length" else f for f in _REQUIRED]
    # All missing flags are named at once, with the reason where the tokenizer was asked in vain.
    if vocabulary is None:
        flags.require(required, _WHY_REQUIRED)
    else:
        source += f" (vocabulary of {vocabulary.size}: {vocabulary.note})"
        flags.require([flag for flag in required if flag != "--vocab-size"], {})
    model = _model(flags, vocabulary)
    training = training_of(flags, model)
    return Workload(model, training, flags.kept(), source, flags.unread(), job.exports)


def _model(flags: FlagReader, vocabulary: Vocabulary | None) -> ModelSpec:
    # Sizes without which there is no model.
    num_layers = flags.required_size("--num-layers")
    if num_layers > MAX_LAYERS:
        flags.fail(["--num-layers"], f"--num-layers is {num_layers}; at most {MAX_LAYERS} are read")
    hidden_size = flags.required_size("--hidden-size")
    num_heads = flags.required_size("--num-attention-heads")
    seq_length = flags.required_size(_sequence_flag(flags))
    max_positions = flags.required_size("--max-position-embeddings")
    vocab_size = vocabulary.size if vocabulary else flags.required_size("--vocab-size")
    # Megatron asserts this too, but only on the cluster.
    if max_positions < seq_length:
        flags.fail(
            ["--max-position-embeddings"],
            f"--max-position-embeddings {max_positions} is less than --seq-length {seq_length}; "
            "raise it or shorten the sequence",
        )
    swiglu = flags.switch("--swiglu")
    ffn_hidden_size = _ffn_hidden_size(flags, hidden_size, swiglu)
    num_experts = flags.size("--num-experts", 0, minimum=0)
    return ModelSpec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=_num_query_groups(flags, num_heads),
        kv_channels=_kv_channels(flags, hidden_size, num_heads),
        vocab_size=vocab_size,
        seq_length=seq_length,
        max_position_embeddings=max_positions,
        gated_mlp=swiglu or flags.switch("--quick-geglu"),
        tied_embeddings=not flags.switch("--untie-embeddings-and-output-weights"),
        add_bias_linear=not flags.switch("--disable-bias-linear"),
        add_qkv_bias=flags.switch("--add-qkv-bias"),
        normalization=cast(
            Literal["LayerNorm", "RMSNorm"],
            flags.text("--normalization", "LayerNorm", ("LayerNorm", "RMSNorm")),
        ),
        position_embedding=_position_embedding(flags),
        qk_layernorm=flags.switch("--qk-layernorm"),
        num_experts=num_experts,
        moe_router_topk=_moe_router_topk(flags, num_experts),
        moe_ffn_hidden_size=(
            flags.size("--moe-ffn-hidden-size", ffn_hidden_size) if num_experts else 0
        ),
        make_vocab_size_divisible_by=flags.size("--make-vocab-size-divisible-by", 128),
        learns_softmax_offset=flags.text("--softmax-type", "vanilla", SOFTMAXES) == "learnable",
        attention_output_gate=flags.switch("--attention-output-gate"),
        mtp_num_layers=flags.size("--mtp-num-layers", 0, minimum=0),
        **layers_with_experts(flags, num_layers, num_experts),
        **latent_attention(flags),
    )


def _sequence_flag(flags: FlagReader) -> str:
    """Return the name under which the length of a sequence is given; Megatron takes one of two."""
    other = "--encoder-seq-length"
    if other in flags and "--seq-length" in flags:
        flags.fail([other], f"both --seq-length and {other} are given; keep one of them")
    return other if other in flags else "--seq-length"


def _ffn_hidden_size(flags: FlagReader, hidden_size: int, swiglu: bool) -> int:
    """Read --ffn-hidden-size, by default Megatron's, which --swiglu (but not --quick-geglu) shrinks
    to 2/3, by 64."""
    # Megatron keeps the parameters of a gated MLP near those of a plain one: 3 matrices by 2/3.
    default = int((4 * hidden_size * 2 / 3) / 64) * 64 if swiglu else 4 * hidden_size
    if default == 0 and "--ffn-hidden-size" not in flags:
        flags.fail(
            ["--swiglu"],
            f"Megatron's default --ffn-hidden-size is 0 with --hidden-size {hidden_size} and "
            "--swiglu; add --ffn-hidden-size",
        )
    return flags.size("--ffn-hidden-size", default)


def _num_query_groups(flags: FlagReader, num_heads: int) -> int:
    """Read --num-query-groups, which Megatron ignores without --group-query-attention."""
    if not flags.switch("--group-query-attention"):
        return num_heads
    # Megatron's default is a single group, which is attention with one key and value.
    groups = flags.size("--num-query-groups", 1)
    if num_heads % groups:
        flags.fail(
            ["--num-query-groups"],
            f"--num-query-groups {groups} does not divide --num-attention-heads {num_heads}",
        )
    return groups


def _kv_channels(flags: FlagReader, hidden_size: int, num_heads: int) -> int:
    kv_channels = flags.optional_size("--kv-channels")
    if kv_channels is not None:
        return kv_channels
    # Megatron asserts the same where it has to take the quotient.
    if hidden_size % num_heads:
        flags.fail(
            ["--num-attention-heads"],
            f"--num-attention-heads {num_heads} does not divide --hidden-size {hidden_size}; "
            "change one, or give the width of a head by --kv-channels",
        )
    return hidden_size // num_heads


def _position_embedding(flags: FlagReader) -> Literal["learned_absolute", "rope", "yarn", "none"]:
    # The older flag of Megatron beats the newer one.
    if flags.switch("--use-rotary-position-embeddings"):
        return "rope"
    flag = "--position-embedding-type"
    for kind in ("mrope", "relative"):
        # Kinds that Megatron has and a GPT's cost model has not.
        if flag in flags and flags.words(flag) == (kind,):
            flags.refuse(flag, f'"{kind}"')
    position = flags.text(flag, "learned_absolute", _POSITION_EMBEDDINGS)
    return cast(Literal["learned_absolute", "rope", "yarn", "none"], position)


def _moe_router_topk(flags: FlagReader, num_experts: int) -> int:
    if not num_experts:
        return 0
    topk = flags.size("--moe-router-topk", 2)
    if topk > num_experts:
        flags.fail(
            ["--moe-router-topk"],
            f"--moe-router-topk {topk} is more than --num-experts {num_experts}",
        )
    return topk
