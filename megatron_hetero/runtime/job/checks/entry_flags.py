"""Flags that this package's training entry cannot follow under any plan."""

from __future__ import annotations

from megatron_hetero.flags.support.of_plan import RECOMPUTED_BIASES
from megatron_hetero.flags.support.rules import Rule, is_packed, reports_logits
from megatron_hetero.model.megatron_release import MEGATRON
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.model.fp8 import ON_A_CPU
from megatron_hetero.runtime.transformer_engine import layers

NOT_IN_THIS_ENTRY: tuple[Rule, ...] = (
    # Validation and loading: what Megatron itself fails at.
    (
        "--eval-interval is missing",
        lambda a: a.eval_interval is None,
        "Megatron divides by it even with --eval-iters 0; give for example 1000",
    ),
    (
        "--full-validation without --multiple-validation-sets",
        lambda a: a.full_validation and not a.multiple_validation_sets,
        f"give both; {MEGATRON} fails at the first validation otherwise",
    ),
    (
        "--multiple-validation-sets with fewer than two --valid-data-path",
        lambda a: a.multiple_validation_sets and len(a.valid_data_path or ()) < 2,
        "name two or more",
    ),
    (
        "--multiple-validation-sets with --test-data-path",
        lambda a: a.multiple_validation_sets and a.test_data_path is not None,
        f"leave the test set out; {MEGATRON} fails at it",
    ),
    (
        "--optimizer sgd with --load",
        lambda a: (
            a.optimizer == "sgd"
            and bool(a.load)
            and not (a.finetune or a.no_load_optim)
            and has_checkpoint(a.load)
        ),
        f"add --no-load-optim, or use adam; {MEGATRON} cannot load the state of SGD",
    ),
    ("--hybrid-context-parallel", lambda a: a.hybrid_context_parallel, "leave it out"),
    # Packed sequences, whose documents must not see each other.
    (
        "--sft with --reset-attention-mask / --reset-position-ids",
        lambda a: a.sft and (a.reset_attention_mask or a.reset_position_ids),
        "leave these out; packed conversations do not see each other without them",
    ),
    (
        "--sft / --dataloader-inter-document-masking with --window-size and "
        "--transformer-impl local",
        lambda a: is_packed(a) and a.window_size is not None and a.transformer_impl == "local",
        "use --transformer-impl transformer_engine, or leave the window out",
    ),
    (
        "--sft / --dataloader-inter-document-masking with --multi-latent-attention and "
        "--transformer-impl local",
        lambda a: is_packed(a) and a.multi_latent_attention and a.transformer_impl == "local",
        "use --transformer-impl transformer_engine",
    ),
    (
        "--sft / --dataloader-inter-document-masking with --qk-clip / --log-max-attention-logit "
        "and --transformer-impl local",
        lambda a: is_packed(a) and reports_logits(a) and a.transformer_impl == "local",
        "use --transformer-impl transformer_engine",
    ),
    (
        "--save-dgrads-interval in fp32",
        lambda a: a.save_dgrads_interval is not None and not (a.bf16 or a.fp16),
        "train in bf16 or fp16; Megatron's loss changes its input in place in fp32, and fails",
    ),
    ("--perform-rl-step", lambda a: a.perform_rl_step, "pre-train"),
    ("--hybrid-layer-pattern", lambda a: a.hybrid_layer_pattern is not None, "train a GPT"),
    ("--inprocess-restart", lambda a: a.inprocess_restart, "leave it out"),
    (
        "--init-method-xavier-uniform",
        lambda a: a.init_method_xavier_uniform,
        f"leave it out; {MEGATRON} takes the flag and fails at it",
    ),
    (
        "--config-logger-dir",
        lambda a: bool(a.config_logger_dir),
        f"leave it out; {MEGATRON} fails to write a configuration that has process groups",
    ),
    RECOMPUTED_BIASES,
    (
        "--rerun-mode report_stats",
        lambda a: a.rerun_mode == "report_stats",
        f"use validate_results or disabled; {MEGATRON} takes the word and fails at it",
    ),
    # Features whose kernels or processes need a GPU.
    (
        "--fp8-format / --fp4-format without a GPU",
        lambda a: (
            bool(a.fp8 or a.fp4)
            and not backend.cuda_is_usable()
            and (bool(a.fp4) or a.fp8_recipe not in ON_A_CPU or not layers.is_provided())
        ),
        "train in bf16; on a CPU fp8 runs with Transformer Engine's layers and one scale for a "
        "tensor (tensorwise, delayed)",
    ),
    (
        "--async-save without a GPU",
        lambda a: a.async_save and not backend.cuda_is_usable(),
        "leave it out; Megatron's writer process asks for one and dies, and the job waits for it",
    ),
)
"""Flags that this entry follows under no plan, since Megatron fails at them, or they need a GPU or
another kind of job."""


def has_checkpoint(folder: str) -> bool:
    """Return whether `--load FOLDER` finds something; without it the job begins anew."""
    from megatron_hetero.runtime.state import choosing

    return choosing.has_checkpoint(folder)
