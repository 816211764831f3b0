"""Megatron's flags of the training, beside those of the model: batch, precision, recompute.

Sources: `megatron/training/arguments.py` (`validate_args`) and `core_transformer_config_from_args`.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

from megatron_hetero.model.flag_reader import FlagReader
from megatron_hetero.model.recompute import recompute_of
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import (
    CpCommType,
    Fp8Recipe,
    FusedLoss,
    FusedScores,
    Precision,
    TensorOverlap,
    TokenDispatcher,
    TrainingSpec,
)

_OPTIMIZERS = ("adam", "sgd")
SOFTMAXES = ("vanilla", "off-by-one", "learnable")
_IMPLEMENTATIONS = ("local", "transformer_engine", "inference_optimized")


def training_of(flags: FlagReader, model: ModelSpec) -> TrainingSpec:
    """Read the training of a model."""
    global_batch_size = flags.required_size("--global-batch-size")
    micro_batch_size = flags.required_size("--micro-batch-size")
    # Megatron divides a batch into whole micro-batches.
    if global_batch_size % micro_batch_size:
        flags.fail(
            ["--global-batch-size"],
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size "
            f"{micro_batch_size}",
        )
    # Optimizers that Megatron has and the memory model has not are refused by name.
    optimizer = flags.words("--optimizer") or ("adam",)
    if optimizer[0] not in _OPTIMIZERS:
        flags.refuse("--optimizer", f'the optimizer "{optimizer[0]}"')
    flash_attention, fused_scores = _scores(flags, model)
    recompute, recompute_modules = recompute_of(flags, model)
    return TrainingSpec(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        precision=_precision(flags),
        sequence_parallel=flags.switch("--sequence-parallel"),
        optimizer=cast(Literal["adam", "sgd"], flags.text("--optimizer", "adam", _OPTIMIZERS)),
        recompute=recompute,
        use_distributed_optimizer=flags.switch("--use-distributed-optimizer"),
        per_token_loss=flags.switch("--calculate-per-token-loss"),
        flash_attention=flash_attention,
        attention_dropout=flags.fraction("--attention-dropout", 0.1),
        hidden_dropout=flags.fraction("--hidden-dropout", 0.1),
        fused_activation=_fused_activation(flags, model),
        overlap_grad_reduce=flags.switch("--overlap-grad-reduce"),
        overlap_param_gather=flags.switch("--overlap-param-gather"),
        grad_reduce_in_bf16=_sums_in_bf16(flags),
        fp8="--fp8-format" in flags,
        fp8_recipe=_fp8_recipe(flags),
        grouped_experts=bool(model.num_experts) and flags.switch("--moe-grouped-gemm"),
        fp32_residual_connection=flags.switch("--fp32-residual-connection"),
        fused_scores=fused_scores,
        token_dispatcher=cast(
            TokenDispatcher,
            flags.text(_DISPATCHER, "allgather", get_args(TokenDispatcher)),
        ),
        tp_comm_overlap=_tp_comm_overlap(flags),
        local_layers=_implementation(flags) != "transformer_engine",
        unfused_gradients=flags.switch("--no-gradient-accumulation-fusion"),
        fused_loss=_fused_loss(flags),
        state_widths=_state_widths(flags),
        recompute_modules=recompute_modules,
        cp_comm_type=_cp_comm_type(flags),
        fp8_param_gather=_fp8_param_gather(flags),
        pads_routing=_pads_routing(flags),
        fuses_permutation=bool(model.num_experts) and flags.switch("--moe-permute-fusion"),
        router_bytes=_router_bytes(flags) if model.num_experts else 0,
    )


def _cp_comm_type(flags: FlagReader) -> CpCommType:
    """Read what divided attention sends: one word for all layers, or one for each."""
    kinds = {*(flags.words("--cp-comm-type") or ())}
    return next((kind for kind in get_args(CpCommType) if kinds == {kind}), "p2p")


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


_PARAM_GATHER, _REUSES = "--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"
_DIVIDED, _FSDP = "--use-distributed-optimizer", ("--use-megatron-fsdp", "--use-torch-fsdp2")


def _fp8_param_gather(flags: FlagReader) -> bool:
    """Read whether weights are kept in fp8, and refuse what Megatron does: in `validate_args`,
    `TransformerConfig` and `DistributedDataParallelConfig`, and for `mxfp8` as it maps weights into
    a buffer (`replace_raw_data` of Transformer Engine)."""
    given, reuses, divides = map(flags.switch, (_PARAM_GATHER, _REUSES, _DIVIDED))
    if given and "--fp8-format" not in flags:
        flags.fail([_PARAM_GATHER], f"{_PARAM_GATHER} goes with --fp8-format alone; leave it out")
    shards = any(map(flags.switch, _FSDP))
    wanted = "" if divides or shards else _DIVIDED
    if given and _fp8_recipe(flags) == "mxfp8" and not (wanted or reuses or shards):
        wanted = _REUSES
    if given and wanted:
        flags.fail(
            [_PARAM_GATHER],
            f"{_PARAM_GATHER} goes with {wanted} alone; add that, or leave {_PARAM_GATHER} out",
        )
    if reuses and not given:
        flags.fail([_REUSES], f"{_REUSES} goes with {_PARAM_GATHER} alone; leave it out")
    return given


_DISPATCHER = "--moe-token-dispatcher-type"
_PADDINGS = "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"


_ROUTER_BYTES = {"fp32": 4, "fp64": 8}


def _router_bytes(flags: FlagReader) -> int:
    """Read the precision of the router's product; 0 without a flag."""
    return _ROUTER_BYTES.get(flags.text("--moe-router-dtype", "", ("", *_ROUTER_BYTES)), 0)


def _pads_routing(flags: FlagReader) -> bool:
    """Read whether routers pad for fp8, and refuse what `TransformerConfig` does."""
    given = [name for name in _PADDINGS if flags.switch(name)]
    if not given or "--num-experts" not in flags:
        return False
    if "--fp8-format" not in flags and "--fp4-format" not in flags:
        flags.fail(given, f"{given[0]} goes with --fp8-format alone; leave it out")
    if flags.text(_DISPATCHER, "allgather", get_args(TokenDispatcher)) == "allgather":
        flags.fail(
            given,
            f"{given[0]} goes with {_DISPATCHER} alltoall or flex alone, and the job's is "
            f"allgather; add {_DISPATCHER} alltoall, or leave {given[0]} out",
        )
    return True


_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_AWARE = "--use-precision-aware-optimizer"


def _sums_in_bf16(flags: FlagReader) -> bool:
    """Read whether gradients are summed in bf16, as the optimizer of few bytes may ask too."""
    main = flags.text("--main-grads-dtype", "fp32", ("fp32", "bf16"))
    return flags.switch("--grad-reduce-in-bf16") or (flags.switch(_AWARE) and main == "bf16")


def _state_widths(flags: FlagReader) -> tuple[int, ...]:
    """Read the bytes of a main weight and of both moments, where the job chooses them.

    Transformer Engine's Adam keeps the main weights, of fp32 beside bf16 the 16 bits alone that the
    weight lacks (`store_param_remainders`); under recipes of fp8 other than `delayed` Megatron
    keeps them (`OptimizerConfig.use_precision_aware_optimizer_no_fp8_or_ds_fp8`).
    """
    if not flags.switch(_AWARE):
        return ()
    main = flags.text("--main-params-dtype", "fp32", ("fp32", "fp16"))
    is_megatrons = main == "fp32" and "--fp8-format" in flags and _fp8_recipe(flags) != "delayed"
    halves = not is_megatrons and (main == "fp16" or flags.switch("--bf16"))
    both = "--exp-avg-dtype", "--exp-avg-sq-dtype"
    moments = [_WIDTHS[flags.text(name, "fp32", tuple(_WIDTHS))] for name in both]
    return 2 if halves else 4, sum(moments)


def _fused_loss(flags: FlagReader) -> FusedLoss:
    """Read whose fused kernels compute the loss."""
    if not flags.switch("--cross-entropy-loss-fusion"):
        return ""
    return cast(FusedLoss, flags.text("--cross-entropy-fusion-impl", "native", ("native", "te")))


def _precision(flags: FlagReader) -> Precision:
    bf16, fp16 = flags.switch("--bf16"), flags.switch("--fp16")
    # Megatron asserts the same.
    if bf16 and fp16:
        flags.fail(["--fp16"], "both --bf16 and --fp16 are given; keep one of them")
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _fused_activation(flags: FlagReader, model: ModelSpec) -> bool:
    return not flags.switch(
        "--no-bias-swiglu-fusion" if model.gated_mlp else "--no-bias-gelu-fusion"
    )


def _implementation(flags: FlagReader) -> str:
    return flags.text("--transformer-impl", "transformer_engine", _IMPLEMENTATIONS)


def _scores(flags: FlagReader, model: ModelSpec) -> tuple[bool, FusedScores]:
    """Return whether attention never stores scores, as is Transformer Engine's default, and where
    local layers store none: where they divide sequences, if torch's fused kernels compute what the
    job asks for (`runtime.parallel.fused_rows.may_be_fused`)."""
    implementation = _implementation(flags)
    backend = flags.text(
        "--attention-backend", "auto", ("flash", "fused", "unfused", "local", "auto")
    )
    # Local layers are fused only without dropout, without an offset and without latents.
    is_plain = (
        flags.fraction("--attention-dropout", 0.1) == 0
        and flags.text("--softmax-type", "vanilla", SOFTMAXES) == "vanilla"
        and not model.kv_lora_rank
    )
    # A backend asked for by name decides, whatever the implementation.
    if backend in ("unfused", "local"):
        return False, "nowhere"
    if implementation == "transformer_engine":
        # Of other heads neither cuDNN nor FlashAttention-2 has a kernel (`get_attention_backend`).
        return all(size % 8 == 0 and size <= 256 for size in model.head_sizes), "nowhere"
    return False, "divided" if implementation == "local" and is_plain else "nowhere"
