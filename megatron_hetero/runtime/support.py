"""What the runtime cannot do yet, refused by the name of the flag before any process group exists.

Only asymmetric plans are held to this list: a plan that stock Megatron can express runs on stock
Megatron, with all of its features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.support import refused_by_presence, without_effect
from megatron_hetero.flags.table import Option
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime import backend, experts, fp8
from megatron_hetero.runtime.batches import global_batch_size

# (flag as the user knows it, whether the parsed arguments ask for it, what to do instead)
_Rule = tuple[str, Callable[[Any], bool], str]

_REFUSED: tuple[_Rule, ...] = (
    ("--expert-model-parallel-size", lambda a: a.expert_model_parallel_size > 1, "use 1"),
    (
        "--use-precision-aware-optimizer",
        lambda a: a.use_precision_aware_optimizer,
        "leave it out; the distributed optimizer of asymmetric plans keeps fp32 state",
    ),
    ("--optimizer-cpu-offload", lambda a: a.optimizer_cpu_offload, "leave it out"),
    (
        "--num-distributed-optimizer-instances",
        lambda a: a.num_distributed_optimizer_instances > 1,
        "use 1",
    ),
    (
        "--use-layer-wise-distributed-optimizer",
        lambda a: getattr(a, "use_layer_wise_distributed_optimizer", False),
        "use --use-distributed-optimizer",
    ),
    ("--fp4-format", lambda a: getattr(a, "fp4", None) is not None, "leave it out"),
    ("--fp32-residual-connection", lambda a: a.fp32_residual_connection, "leave it out"),
    ("--mtp-num-layers", lambda a: a.mtp_num_layers is not None, "leave it out"),
    ("--multi-latent-attention", lambda a: a.multi_latent_attention, "use standard attention"),
    ("--hybrid-layer-pattern", lambda a: a.hybrid_layer_pattern is not None, "train a GPT"),
    ("--use-torch-fsdp2", lambda a: a.use_torch_fsdp2, "leave it out"),
    ("--use-megatron-fsdp", lambda a: a.use_megatron_fsdp, "leave it out"),
    (
        "--rampup-batch-size",
        lambda a: a.rampup_batch_size is not None,
        "use --step-batch-size-schedule; Megatron 0.19 itself ignores --rampup-batch-size",
    ),
    (
        "--step-batch-size-schedule with --train-iters",
        lambda a: a.step_batch_size_schedule is not None and a.train_samples is None,
        "use --train-samples (and --lr-decay-samples, --lr-warmup-samples); Megatron counts "
        "iterations of the learning rate in batches of one micro-batch for each replica then",
    ),
    (
        "--multiple-validation-sets",
        lambda a: a.multiple_validation_sets and not a.full_validation,
        "add --full-validation",
    ),
    (
        "--phase-transition-iterations",
        lambda a: bool(a.phase_transition_iterations),
        "leave it out",
    ),
    (
        "--eval-global-batch-size / --eval-micro-batch-size",
        lambda a: (
            (a.eval_global_batch_size, a.eval_micro_batch_size)
            != (a.global_batch_size, a.micro_batch_size)
        ),
        "leave them out; validation uses the training batch",
    ),
    ("--sft", lambda a: a.sft, "pre-train"),
    ("--hybrid-context-parallel", lambda a: a.hybrid_context_parallel, "leave it out"),
    (
        "--dataloader-inter-document-masking",
        lambda a: a.dataloader_inter_document_masking,
        "leave it out",
    ),
    ("--perform-rl-step", lambda a: a.perform_rl_step, "pre-train"),
    ("--save-wgrads-interval", lambda a: a.save_wgrads_interval is not None, "leave it out"),
    (
        "--cuda-graph-impl",
        lambda a: a.cuda_graph_impl != "none",
        "use none",
    ),
    (
        "--iterations-to-skip",
        lambda a: bool(a.iterations_to_skip),
        "leave it out; replicas would skip unlike parts of the data",
    ),
    (
        "--optimizer muon / adaptive_muon / soap",
        lambda a: a.optimizer not in ("adam", "sgd", "lion"),
        "use adam, sgd or lion; an update that looks at whole matrices depends on their shards",
    ),
    (
        "--softmax-type learnable",
        lambda a: a.softmax_type == "learnable",
        "use vanilla; Megatron does not say how this parameter is divided",
    ),
    (
        "--experimental-attention-variant",
        lambda a: a.experimental_attention_variant is not None,
        "use standard attention",
    ),
    (
        "--heterogeneous-layers-config-path / --heterogeneous-layers-config-encoded-json",
        lambda a: (
            a.heterogeneous_layers_config_path is not None
            or a.heterogeneous_layers_config_encoded_json is not None
        ),
        "use equal layers",
    ),
    ("--qk-clip", lambda a: a.qk_clip, "leave it out; each replica would clip by its own logits"),
    ("--log-max-attention-logit", lambda a: a.log_max_attention_logit, "leave it out"),
    (
        "--tensor-parallel-num-weight-shards",
        lambda a: a.gtp_weight_remat_size > 1,
        "leave it out",
    ),
    (
        "--tp-comm-overlap",
        lambda a: a.tp_comm_overlap,
        "leave it out; it takes all tensor-parallel groups to be of one width",
    ),
    (
        "--reset-attention-mask",
        lambda a: a.reset_attention_mask,
        "leave it out; inner stages get no mask",
    ),
    (
        "--ckpt-format",
        lambda a: a.ckpt_format != "torch_dist",
        "use torch_dist; the others name files by one grid of ranks",
    ),
    (
        "--non-persistent-ckpt-type local",
        lambda a: a.non_persistent_ckpt_type == "local",
        "use global",
    ),
    (
        "--use-mp-args-from-checkpoint-args",
        lambda a: a.use_mp_args_from_checkpoint_args,
        "leave it out; widths and depths are the plan's",
    ),
    (
        "--save-params-interval / --save-dgrads-interval / --save-activations-interval",
        lambda a: (
            (a.save_params_interval, a.save_dgrads_interval, a.save_activations_interval)
            != (None, None, None)
        ),
        "leave them out",
    ),
    (
        "--check-weight-hash-across-dp-replicas-interval",
        lambda a: a.check_weight_hash_across_dp_replicas_interval is not None,
        "leave it out; replicas hold unlike shards",
    ),
    ("--delay-wgrad-compute", lambda a: getattr(a, "delay_wgrad_compute", False), "leave it out"),
    (
        "--defer-embedding-wgrad-compute",
        lambda a: a.defer_embedding_wgrad_compute,
        "leave it out",
    ),
)

# What Megatron-LM's own pre-training script does between the flags and the loop and `runtime.gpt`
# does not; Megatron would go on without it.
_NOT_IN_THIS_ENTRY: tuple[_Rule, ...] = (
    (
        "--eval-interval is missing",
        lambda a: a.eval_interval is None,
        "Megatron divides by it even with --eval-iters 0; give for example 1000",
    ),
    (
        "--full-validation without --multiple-validation-sets",
        lambda a: a.full_validation and not a.multiple_validation_sets,
        "give both; Megatron 0.19 fails at the first validation otherwise",
    ),
    (
        "--multiple-validation-sets with fewer than two --valid-data-path",
        lambda a: a.multiple_validation_sets and len(a.valid_data_path or ()) < 2,
        "name two or more",
    ),
    (
        "--multiple-validation-sets with --test-data-path",
        lambda a: a.multiple_validation_sets and a.test_data_path is not None,
        "leave the test set out; Megatron 0.19 fails at it",
    ),
    (
        "--optimizer sgd with --load",
        lambda a: (
            a.optimizer == "sgd"
            and bool(a.load)
            and not (a.finetune or a.no_load_optim)
            and _has_checkpoint(a.load)
        ),
        "add --no-load-optim, or use adam; Megatron 0.19 cannot load the state of SGD",
    ),
    ("--hybrid-context-parallel", lambda a: a.hybrid_context_parallel, "leave it out"),
    ("--sft", lambda a: a.sft, "pre-train"),
    ("--fim-data", lambda a: a.fim_data, "leave it out"),
    ("--perform-rl-step", lambda a: a.perform_rl_step, "pre-train"),
    ("--mtp-num-layers", lambda a: a.mtp_num_layers is not None, "leave it out"),
    ("--hybrid-layer-pattern", lambda a: a.hybrid_layer_pattern is not None, "train a GPT"),
    (
        "--dataloader-inter-document-masking",
        lambda a: a.dataloader_inter_document_masking,
        "leave it out",
    ),
    (
        "--per-dataset-sequences-path",
        lambda a: a.per_dataset_sequences_path is not None,
        "leave it out",
    ),
    ("--inprocess-restart", lambda a: a.inprocess_restart, "leave it out"),
    (
        "--rerun-mode report_stats",
        lambda a: a.rerun_mode == "report_stats",
        "use validate_results or disabled; Megatron 0.19 takes the word and fails at it",
    ),
    (
        "--async-save without a GPU",
        lambda a: a.async_save and not backend.cuda_is_usable(),
        "leave it out; Megatron's writer process asks for one and dies, and the job waits for it",
    ),
)


def _has_checkpoint(folder: str) -> bool:
    from megatron.training.checkpointing import checkpoint_exists

    return bool(checkpoint_exists(folder))


_NOT_WITH_CONTEXT_PARALLEL: tuple[_Rule, ...] = (
    (
        "--num-experts",
        lambda a: a.num_experts is not None,
        "train a dense model, or use a plan without cp; routers would balance parts of sequences",
    ),
    (
        "--hierarchical-context-parallel-sizes",
        lambda a: a.hierarchical_context_parallel_sizes is not None,
        "leave it out",
    ),
    (
        "--window-size",
        lambda a: a.window_size is not None and a.transformer_impl == "local",
        "use --transformer-impl transformer_engine, or leave it out",
    ),
)
_NOT_WITH_SPLIT_PASSES: tuple[_Rule, ...] = (
    (
        "--transformer-impl",
        lambda a: a.transformer_impl != "local",
        "use local; only its linear layers can put off weight gradients",
    ),
    (
        "--overlap-grad-reduce",
        lambda a: a.overlap_grad_reduce,
        "leave it out; it takes a gradient for complete when its backward pass is",
    ),
)


def check_plan(plan: Plan) -> None:
    """Refuse parts of a valid plan, `with_micro_batch_sizes`, that this version cannot run.

    Raises:
        UnsupportedError: names every such part and the stage it is on.
    """
    found = []
    batch = global_batch_size(plan)
    for r, replica in enumerate(plan.replicas):
        if batch % (replica.micro_batch_size or 1):
            found.append(
                f"replica {r}: micro-batches of {replica.micro_batch_size} sequences, which do not "
                f"divide the global batch of {batch} (Megatron counts in them)"
            )
        for s, stage in enumerate(replica.stages):
            where = f"replica {r}, stage {s}"
            if stage.precision is not None:
                found.append(f"{where}: precision of its own ({stage.precision})")
    if found:
        raise UnsupportedError(
            "The plan is valid, but this version's runtime cannot run these parts of it yet:\n  "
            + "\n  ".join(found)
            + "\nLeave them out of the plan, or plan again without them."
        )


def check_arguments(args: Any, plan: Plan) -> None:
    """Refuse Megatron flags that an asymmetric plan cannot honour yet.

    Raises:
        UnsupportedError: names every such flag and what to do instead.
    """
    if args.full_validation and rank_table(plan)[0].tensor_rank != 0:
        raise UnsupportedError(
            "--full-validation: Megatron asks rank 0 how long the sets are, and expects the first "
            "place of a tensor-parallel group there; the plan's rank 0 is another. List the "
            "devices of its stage with that node's first GPU first, or leave the flag out."
        )
    if args.num_experts is not None:
        _refuse(experts.REFUSED, args, "With --num-experts, an asymmetric plan cannot honour yet:")
        experts.check_micro_batches(plan, args)
    if args.fp8 is not None:
        _refuse(fp8.REFUSED, args, "With --fp8-format, an asymmetric plan cannot honour:")
    has_shares = any(stage.shape.shares for r in plan.replicas for stage in r.stages)
    if has_shares and args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te":
        raise UnsupportedError(
            "--cross-entropy-fusion-impl te: it takes all ranks to hold equally many rows of the "
            "vocabulary, which the plan's shares divide. Use native."
        )
    _refuse(_REFUSED, args, "These flags are not supported on an asymmetric plan yet:")


def check_context_parallel(plan: Plan, args: Any) -> None:
    """Refuse flags that context-parallel stages cannot honour yet.

    Raises:
        UnsupportedError: names every such flag and what to do instead.
    """
    if plan.layout.has_context_parallel:
        heading = "These flags do not go with the context parallelism (cp) of a plan:"
        _refuse(_NOT_WITH_CONTEXT_PARALLEL, args, heading)


def check_orders(plan: Plan, args: Any) -> None:
    """Refuse flags that orders with split backward passes (I and W) cannot honour yet.

    Raises:
        UnsupportedError: names every such flag and what to do instead.
    """
    split = any("I" in (stage.order or "") for r in plan.replicas for stage in r.stages)
    if split:
        _refuse(_NOT_WITH_SPLIT_PASSES, args, "These flags do not go with a plan's I and W passes:")


def check_flags(options: Sequence[Option]) -> tuple[str, ...]:
    """Refuse flags that no value makes good, as given on the command line.

    Returns:
        A warning for each flag that changes nothing.
    Raises:
        UnsupportedError: names the flags to leave out.
    """
    refused = refused_by_presence(options)
    if refused:
        raise UnsupportedError(
            "These flags are not supported on an asymmetric plan; leave them out:\n  "
            + "\n  ".join(option.name for option in refused)
        )
    return tuple(
        f"{option.name} has no effect on an asymmetric plan: {why}"
        for option, why in without_effect(options)
    )


def check_stock(args: Any) -> None:
    """Refuse what this entry follows on plans of its own alone.

    Raises:
        UnsupportedError: names the flag and what to do instead.
    """
    rule: _Rule = (
        "--context-parallel-size",
        lambda a: a.context_parallel_size > 1,
        "let a plan say it, as in --hetero-layout tp1cp2:4",
    )
    _refuse((rule,), args, "megatron_hetero.pretrain_gpt cannot train without a plan with:")


def check_entry(args: Any) -> None:
    """Refuse Megatron flags that this entry does not follow under any plan.

    Raises:
        UnsupportedError: names every such flag and what to do instead.
    """
    _refuse(
        _NOT_IN_THIS_ENTRY,
        args,
        "megatron_hetero.pretrain_gpt cannot train with these flags:",
    )


def _refuse(rules: Sequence[_Rule], args: Any, heading: str) -> None:
    found = [f"{flag}: {instead}" for flag, asks, instead in rules if asks(args)]
    if found:
        raise UnsupportedError("\n  ".join([heading, *found]))
