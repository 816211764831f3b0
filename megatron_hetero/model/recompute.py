"""Which modules of a layer the backward pass computes again: `--recompute-modules` of Megatron.

Source: `recompute_modules` of `megatron/core/transformer/transformer_config.py` (0.19).  Whole
checkpoints keep what goes into a module and drop all else: `core_attn`, `mlp` (of dense layers),
`moe` and `shared_experts`.  The others drop what the module gives alone
(`CheckpointWithoutOutput`): `layernorm`, `mla_up_proj` (queries, keys and values from latents) and
`moe_act` (the activation of grouped experts).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, cast, get_args

from megatron_hetero.model.flag_reader import FlagReader
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec

Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "moe_act"
]
WITH_SHARED_EXPERT = frozenset({"moe", "shared_experts"})
"""Modules that contain the shared expert."""
_MODULES = frozenset(get_args(RecomputeModule))
_DEFAULT = "core_attn"
_MODULES_FLAG, _LAYER_FLAG = "--recompute-modules", "--moe-layer-recompute"


def recomputed(training: TrainingSpec, granularity: str | None = None) -> frozenset[str]:
    """Return the modules of a layer that are computed again; all of them under full recompute.

    Args:
        training: of the job.
        granularity: of a stage, where it is not the job's own.
    """
    kind = granularity or training.recompute
    if kind == "selective":
        return frozenset(training.recompute_modules or (_DEFAULT,))
    return _MODULES if kind == "full" else frozenset()


def modules_if_selective(training: TrainingSpec) -> tuple[str, ...]:
    """Return the modules of a selective job where they are not Megatron's default; else nothing."""
    return training.recompute_modules if training.recompute == "selective" else ()


def norms_again(
    model: ModelSpec, training: TrainingSpec, modules: frozenset[str]
) -> tuple[bool, bool]:
    """Return whether the norm before attention, and the one before the MLP, are computed again.

    Transformer Engine's layers have a norm in the product behind it; by itself it stands before
    latent attention and before a router alone (`gpt_layer_specs.py`).
    """
    if "layernorm" not in modules:
        return False, False
    if training.local_layers:
        return True, True
    return bool(model.kv_lora_rank), bool(model.num_experts)


def recompute_of(flags: FlagReader, model: ModelSpec) -> tuple[Recompute, tuple[str, ...]]:
    """Read Megatron's granularity and what "selective" means (empty: Megatron's default); set the
    forms of full recompute aside that a plan does not start from.

    `--moe-layer-recompute` is the older word for `moe` beside the other modules, and makes a job
    selective: its flags say so from here on.

    Raises:
        ModelError: values that Megatron does not know, or refuses in this job.
    """
    granularity = flags.text("--recompute-granularity", "none", ("full", "selective"))
    asked = flags.words(_MODULES_FLAG)
    modules = set((_DEFAULT,) if asked is None else asked)
    if flags.switch(_LAYER_FLAG):
        if granularity == "full":
            flags.fail(
                [_LAYER_FLAG],
                f"{_LAYER_FLAG} and --recompute-granularity full exclude each other in Megatron; "
                "keep one of them",
            )
        modules.add("moe")
        said = {"--recompute-granularity": ["selective"], _MODULES_FLAG: sorted(modules)}
        flags.say_instead(_LAYER_FLAG, said)
        granularity = "selective"
    # Another older flag is short for the selective granularity.
    if flags.switch("--recompute-activations"):
        granularity = "selective"
    if granularity == "selective":
        _check_modules(flags, model, modules)
    if granularity == "full":
        _check_full(flags, model.num_layers)
    # In one order, so that equal jobs have equal plans.
    is_default = modules == {_DEFAULT}
    listed = () if is_default else tuple(m for m in get_args(RecomputeModule) if m in modules)
    return cast(Recompute, granularity), listed


def _check_modules(flags: FlagReader, model: ModelSpec, modules: Collection[str]) -> None:
    """Refuse what Megatron refuses (`TransformerConfig.__post_init__`)."""
    where = [_MODULES_FLAG]
    if not modules:
        flags.fail(where, f"{_MODULES_FLAG} has no value; the default is {_DEFAULT}")
    if unknown := sorted(set(modules) - _MODULES):
        allowed = ", ".join(get_args(RecomputeModule))
        flags.fail(where, f'{_MODULES_FLAG} has "{unknown[0]}"; allowed: {allowed}')
    # What a module asks of the rest of the job.
    is_shared = bool(model.moe_shared_expert_intermediate_size)
    is_delayed = "--fp8-format" in flags and flags.known_text("--fp8-recipe") in (None, "delayed")
    faults = {
        "moe_act without --moe-grouped-gemm": not flags.switch("--moe-grouped-gemm"),
        "mla_up_proj without --multi-latent-attention": not model.kv_lora_rank,
        "shared_experts with --moe-shared-expert-overlap": is_shared
        and flags.switch("--moe-shared-expert-overlap"),
        "layernorm with --fp8-recipe delayed": is_delayed,
        "moe_act with --fp8-recipe delayed": is_delayed,
    }
    for words, holds in faults.items():
        if holds and words.split()[0] in modules:
            flags.fail(where, f"Megatron refuses {_MODULES_FLAG} {words}; change one of them")
    if "mlp" in modules and model.add_bias_linear:
        # `flags.support.of_plan.RECOMPUTED_BIASES` says why.
        what = "mlp with biases (without --disable-bias-linear), whose backward pass does not end,"
        flags.refuse(_MODULES_FLAG, what)
    number = "--recompute-num-layers"
    if number in flags:
        what = "counts layers of full recompute, and the job's is selective; leave it out"
        flags.fail([number], f"{number} {what}")


def _check_full(flags: FlagReader, num_layers: int) -> None:
    """Look how many layers are recomputed, and in which way; Megatron has no default for either."""
    method = flags.text("--recompute-method", "", ("uniform", "block"))
    layers = flags.optional_size("--recompute-num-layers")
    if not method or layers is None:
        flags.fail(
            ["--recompute-granularity"],
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; "
            "add --recompute-method uniform --recompute-num-layers 1",
        )
    # `uniform` counts layers that are recomputed together, `block` layers of each stage.
    if method == "uniform" and layers != 1:
        _set_aside(flags, f"recompute of {layers} layers at a time")
    if method == "block" and layers < num_layers:
        _set_aside(flags, f"recompute of {layers} layers of each stage")


def _set_aside(flags: FlagReader, what: str) -> None:
    """Take the plan's own form of full recompute in place of the job's, as parallel sizes are."""
    reason = "the plan decides which layers are recomputed, and is made from all, one at a time"
    flags.set_aside("--recompute-num-layers", what, reason)
    flags.replace("--recompute-method", "uniform")
    flags.replace("--recompute-num-layers", "1")
