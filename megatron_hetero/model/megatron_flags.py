"""Megatron's flags to a `Workload`, with the defaults and derived values of Megatron 0.19.2.

Sources: `megatron/training/arguments.py` (`validate_args`) and `core_transformer_config_from_args`.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

from megatron_hetero.model.arguments import JobText
from megatron_hetero.model.flag_reader import FlagReader
from megatron_hetero.model.kinds_of_layers import latent_attention, layers_with_experts
from megatron_hetero.model.spec import (
    MAX_LAYERS,
    Fp8Recipe,
    FusedScores,
    ModelSpec,
    Precision,
    TensorOverlap,
    TokenDispatcher,
    TrainingSpec,
    Workload,
)
from megatron_hetero.model.tokenizer import Vocabulary, vocabulary_of

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
}
_UNSUPPORTED_UNLESS = {
    "--context-parallel-size": ("context parallelism", "1"),
}
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
_OPTIMIZERS = ("adam", "sgd")
_POSITION_EMBEDDINGS = ("learned_absolute", "rope", "yarn", "none")
_IMPLEMENTATIONS = ("local", "transformer_engine", "inference_optimized")
_SOFTMAXES = ("vanilla", "off-by-one", "learnable")
_RECOMPUTE = ("full", "selective")


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
    for flag, what in _UNSUPPORTED.items():
        flags.refuse(flag, what)
    for flag, (what, neutral) in _UNSUPPORTED_UNLESS.items():
        flags.refuse(flag, what, unless=neutral)
    vocabulary = None if "--vocab-size" in flags else vocabulary_of(flags)
    required = [_sequence_flag(flags) if f == "--seq-length" else f for f in _REQUIRED]
    if vocabulary is None:
        flags.require(required, _WHY_REQUIRED)
    else:
        source += f" (vocabulary of {vocabulary.size}: {vocabulary.note})"
        flags.require([flag for flag in required if flag != "--vocab-size"], {})
    model = _model(flags, vocabulary)
    training = _training(flags, model)
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
        learns_softmax_offset=flags.text("--softmax-type", "vanilla", _SOFTMAXES) == "learnable",
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
    if hidden_size % num_heads:
        flags.fail(
            ["--num-attention-heads"],
            f"--num-attention-heads {num_heads} does not divide --hidden-size {hidden_size}; "
            "change one, or give the width of a head by --kv-channels",
        )
    return hidden_size // num_heads


def _position_embedding(flags: FlagReader) -> Literal["learned_absolute", "rope", "yarn", "none"]:
    if flags.switch("--use-rotary-position-embeddings"):
        return "rope"
    flag = "--position-embedding-type"
    for kind in ("mrope", "relative"):
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


def _training(flags: FlagReader, model: ModelSpec) -> TrainingSpec:
    global_batch_size = flags.required_size("--global-batch-size")
    micro_batch_size = flags.required_size("--micro-batch-size")
    if global_batch_size % micro_batch_size:
        flags.fail(
            ["--global-batch-size"],
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size "
            f"{micro_batch_size}",
        )
    optimizer = flags.words("--optimizer") or ("adam",)
    if optimizer[0] not in _OPTIMIZERS:
        flags.refuse("--optimizer", f'the optimizer "{optimizer[0]}"')
    flash_attention, fused_scores = _scores(flags, model)
    return TrainingSpec(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        precision=_precision(flags),
        sequence_parallel=flags.switch("--sequence-parallel"),
        optimizer=cast(Literal["adam", "sgd"], flags.text("--optimizer", "adam", _OPTIMIZERS)),
        recompute=_recompute(flags, model.num_layers),
        use_distributed_optimizer=flags.switch("--use-distributed-optimizer"),
        per_token_loss=flags.switch("--calculate-per-token-loss"),
        flash_attention=flash_attention,
        attention_dropout=flags.fraction("--attention-dropout", 0.1),
        hidden_dropout=flags.fraction("--hidden-dropout", 0.1),
        fused_activation=_fused_activation(flags, model),
        overlap_grad_reduce=flags.switch("--overlap-grad-reduce"),
        overlap_param_gather=flags.switch("--overlap-param-gather"),
        grad_reduce_in_bf16=flags.switch("--grad-reduce-in-bf16"),
        fp8="--fp8-format" in flags,
        fp8_recipe=_fp8_recipe(flags),
        grouped_experts=bool(model.num_experts) and flags.switch("--moe-grouped-gemm"),
        fp32_residual_connection=flags.switch("--fp32-residual-connection"),
        fused_scores=fused_scores,
        token_dispatcher=cast(
            TokenDispatcher,
            flags.text("--moe-token-dispatcher-type", "allgather", get_args(TokenDispatcher)),
        ),
        tp_comm_overlap=_tp_comm_overlap(flags),
    )


_TENSOR_OVERLAPS: dict[TensorOverlap, tuple[str, ...]] = {
    "gather": ("--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag"),
    "scatter": ("--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs"),
    "bulk_dgrad": ("--no-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad"),
    "bulk_wgrad": ("--no-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad"),
}
"""Exchanges under products -> flags that leave them out."""


def _tp_comm_overlap(flags: FlagReader) -> tuple[TensorOverlap, ...]:
    """Read which exchanges Transformer Engine hides under products; local layers hide none, and
    nothing is hidden without sequence parallelism."""
    asked = flags.switch("--tp-comm-overlap"), flags.switch("--sequence-parallel")
    implementation = flags.text("--transformer-impl", "transformer_engine", _IMPLEMENTATIONS)
    if not all(asked) or implementation != "transformer_engine":
        return ()
    found = [kind for kind, off in _TENSOR_OVERLAPS.items() if not any(map(flags.switch, off))]
    if flags.switch("--tp-comm-overlap-rs-dgrad"):
        found.append("scatter_dgrad")
    return tuple(found)


def _fp8_recipe(flags: FlagReader) -> Fp8Recipe:
    """Read how fp8 is scaled; a job without fp8 has what a plan does not write."""
    if "--fp8-format" not in flags:
        return "tensorwise"
    return cast(Fp8Recipe, flags.text("--fp8-recipe", "delayed", get_args(Fp8Recipe)))


def _precision(flags: FlagReader) -> Precision:
    bf16, fp16 = flags.switch("--bf16"), flags.switch("--fp16")
    if bf16 and fp16:
        flags.fail(["--fp16"], "both --bf16 and --fp16 are given; keep one of them")
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _recompute(flags: FlagReader, num_layers: int) -> Literal["none", "selective", "full"]:
    """Read Megatron's granularity; set the forms aside that a plan does not start from."""
    granularity = flags.text("--recompute-granularity", "none", _RECOMPUTE)
    if flags.switch("--recompute-activations"):
        granularity = "selective"
    if granularity == "selective":
        modules = flags.words("--recompute-modules")
        if modules is not None and "core_attn" not in modules:
            flags.refuse("--recompute-modules", "selective recompute without core_attn")
        return "selective"
    if granularity == "none":
        return "none"
    method = flags.text("--recompute-method", "", ("uniform", "block"))
    layers = flags.optional_size("--recompute-num-layers")
    if not method or layers is None:
        flags.fail(
            ["--recompute-granularity"],
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; "
            "add --recompute-method uniform --recompute-num-layers 1",
        )
    if method == "uniform" and layers != 1:
        _set_recompute_aside(flags, f"recompute of {layers} layers at a time")
    if method == "block" and layers < num_layers:
        _set_recompute_aside(flags, f"recompute of {layers} layers of each stage")
    return "full"


def _set_recompute_aside(flags: FlagReader, what: str) -> None:
    """Take the plan's own form of full recompute in place of the job's, as parallel sizes are."""
    reason = "the plan decides which layers are recomputed, and is made from all, one at a time"
    flags.set_aside("--recompute-num-layers", what, reason)
    flags.replace("--recompute-method", "uniform")
    flags.replace("--recompute-num-layers", "1")


def _fused_activation(flags: FlagReader, model: ModelSpec) -> bool:
    return not flags.switch(
        "--no-bias-swiglu-fusion" if model.gated_mlp else "--no-bias-gelu-fusion"
    )


def _scores(flags: FlagReader, model: ModelSpec) -> tuple[bool, FusedScores]:
    """Return whether attention never stores scores, as is Transformer Engine's default, and where
    local layers store none: where they divide sequences, if torch's fused kernels compute what the
    job asks for (`runtime.parallel.fused_rows.may_be_fused`)."""
    implementation = flags.text("--transformer-impl", "transformer_engine", _IMPLEMENTATIONS)
    backend = flags.text(
        "--attention-backend", "auto", ("flash", "fused", "unfused", "local", "auto")
    )
    is_plain = (
        flags.fraction("--attention-dropout", 0.1) == 0
        and flags.text("--softmax-type", "vanilla", _SOFTMAXES) == "vanilla"
        and not model.kv_lora_rank
    )
    if backend in ("unfused", "local"):
        return False, "nowhere"
    if implementation == "transformer_engine":
        return True, "nowhere"
    return False, "divided" if implementation == "local" and is_plain else "nowhere"
