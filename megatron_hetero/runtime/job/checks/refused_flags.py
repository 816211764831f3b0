"""Flags that the runtime cannot follow yet: the name, the condition, and the advice."""

from __future__ import annotations

from megatron_hetero.flags.support.rules import Rule
from megatron_hetero.model.megatron_release import MEGATRON
from megatron_hetero.runtime.job.checks.entry_flags import has_checkpoint

REFUSED: tuple[Rule, ...] = (
    ("--expert-model-parallel-size", lambda a: a.expert_model_parallel_size > 1, "use 1"),
    # The plan divides the optimizer's state into pieces, which these variants do not know.
    (
        "--use-precision-aware-optimizer",
        lambda a: a.use_precision_aware_optimizer,
        "leave it out; the distributed optimizer of asymmetric plans keeps fp32 state",
    ),
    (
        "--optimizer-cpu-offload",
        lambda a: a.optimizer_cpu_offload,
        "leave it out; Megatron offloads what its own distributed optimizer divides",
    ),
    (
        "--use-layer-wise-distributed-optimizer",
        lambda a: getattr(a, "use_layer_wise_distributed_optimizer", False),
        "use --use-distributed-optimizer",
    ),
    (
        "--dist-ckpt-optim-fully-reshardable with --optimizer other than adam",
        lambda a: (
            a.dist_ckpt_optim_fully_reshardable
            and a.use_distributed_optimizer
            and a.optimizer != "adam"
        ),
        "leave it out; stock Megatron's form is of Adam's state",
    ),
    ("--fp4-format", lambda a: getattr(a, "fp4", None) is not None, "leave it out"),
    ("--hybrid-layer-pattern", lambda a: a.hybrid_layer_pattern is not None, "train a GPT"),
    # Both divide weights over data-parallel groups, each of which is a single rank here.
    ("--use-torch-fsdp2", lambda a: a.use_torch_fsdp2, "leave it out"),
    ("--use-megatron-fsdp", lambda a: a.use_megatron_fsdp, "leave it out"),
    # Batches, validation and phases are counted over the whole job.
    (
        "--rampup-batch-size",
        lambda a: a.rampup_batch_size is not None,
        f"use --step-batch-size-schedule; {MEGATRON} itself ignores --rampup-batch-size",
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
        "--phase-transition-iterations without --train-samples",
        lambda a: bool(a.phase_transition_iterations) and a.train_samples is None,
        "give --train-samples in place of --train-iters; Megatron counts a phase in samples",
    ),
    ("--hybrid-context-parallel", lambda a: a.hybrid_context_parallel, "leave it out"),
    ("--perform-rl-step", lambda a: a.perform_rl_step, "pre-train"),
    (
        "--cuda-graph-impl",
        lambda a: a.cuda_graph_impl != "none",
        "use none",
    ),
    (
        "--optimizer muon / adaptive_muon / soap / lion",
        lambda a: a.optimizer not in ("adam", "sgd"),
        "use adam or sgd; an update that looks at whole matrices depends on their shards, and the "
        "state of lion is not priced yet",
    ),
    (
        "--experimental-attention-variant",
        lambda a: a.experimental_attention_variant is not None,
        "use standard attention",
    ),
    (
        "--qk-clip with --use-distributed-optimizer",
        lambda a: a.qk_clip and a.use_distributed_optimizer,
        "leave one of them out; Megatron clips whole main weights, of which a rank has pieces",
    ),
    # Groups that divide weights in this way are a single rank each here.
    (
        "--tensor-parallel-num-weight-shards",
        lambda a: a.gtp_weight_remat_size > 1,
        "leave it out",
    ),
    # Checkpoints have global shapes; these settings assume one grid of ranks.
    (
        "--ckpt-format",
        lambda a: a.ckpt_format != "torch_dist",
        "use torch_dist; the others name files by one grid of ranks. Stock Megatron writes such a "
        "checkpoint anew: its own flags with --load OLD --ckpt-convert-format torch_dist "
        "--ckpt-convert-save NEW",
    ),
    (
        "--ckpt-convert-format torch",
        lambda a: a.ckpt_convert_format not in (None, "torch_dist"),
        "use torch_dist; the other names files by one grid of ranks",
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
        "--distribute-saved-activations",
        lambda a: a.distribute_saved_activations,
        "use --sequence-parallel, which divides them already",
    ),
    (
        "--dump-param-to-param-group-map with --use-distributed-optimizer",
        lambda a: bool(a.dump_param_to_param_group_map) and a.use_distributed_optimizer,
        "leave it out; the optimizer has pieces of parameters, which Megatron cannot name",
    ),
    # Nothing else gives values to weights that nobody draws.
    (
        "--no-initialization without a checkpoint in --load",
        lambda a: not a.perform_initialization and not (a.load and has_checkpoint(a.load)),
        "leave it out; weights would be what lies in memory",
    ),
    (
        "--no-initialization with --dist-ckpt-strictness",
        lambda a: not a.perform_initialization and a.dist_ckpt_strictness != "assume_ok_unexpected",
        "leave one of them out; what the checkpoint lacks would be what lies in memory",
    ),
    (
        "--dist-ckpt-strictness",
        lambda a: (
            a.dist_ckpt_strictness not in ("assume_ok_unexpected", "log_unexpected", "log_all")
        ),
        "leave it out, or use log_unexpected or log_all; a plan's checkpoint has entries of its "
        "own, which would be taken for faults",
    ),
    (
        "--gpu-sniff-test-interval",
        lambda a: a.gpu_sniff_test_interval is not None,
        "leave it out; ranks of a wide stage would wait for reports that narrow stages do not "
        "have. megatron-hetero probe measures GPUs and links before the job",
    ),
    # The order of a plan says when weight gradients are made.
    ("--delay-wgrad-compute", lambda a: getattr(a, "delay_wgrad_compute", False), "leave it out"),
    (
        "--defer-embedding-wgrad-compute",
        lambda a: a.defer_embedding_wgrad_compute,
        "leave it out",
    ),
)
"""Flags refused on an asymmetric plan."""

NOT_WITH_SHARDED_LAYERS: tuple[Rule, ...] = (
    (
        "--save-params-interval / --save-wgrads-interval",
        lambda a: a.save_params_interval is not None or a.save_wgrads_interval is not None,
        "leave them out; weights and gradients of sharded layers are on other ranks",
    ),
    (
        "--log-params-norm",
        lambda a: a.log_params_norm,
        "leave it out; it reads weights that are on other ranks",
    ),
    (
        "--recompute-num-layers",
        lambda a: (
            a.recompute_granularity == "full"
            and a.recompute_method == "uniform"
            and a.recompute_num_layers != 1
        ),
        "give it as 1, or use --recompute-method block; layers recomputed in one piece would be "
        "gathered in another order than elsewhere",
    ),
    ("--fp8-format", lambda a: a.fp8 is not None, "train in bf16, or use a plan without z"),
    ("--qk-clip", lambda a: a.qk_clip, "leave it out; it clips weights that are on other ranks"),
)
"""Flags refused on a plan with sharded layers."""
NOT_WITH_SPLIT_PASSES: tuple[Rule, ...] = (
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
"""Flags refused on a plan whose orders have I and W passes."""
