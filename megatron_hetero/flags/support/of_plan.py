"""Flags that do not go with something that a plan has, refused when the plan becomes flags and at
the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.gpu_needs import without_divided_attention
from megatron_hetero.flags.support.rules import (
    Rule,
    given_arguments,
    is_packed,
    refuse,
    reports_logits,
)
from megatron_hetero.model.flag_table import Option
from megatron_hetero.plan.checks.violation import stages
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import recompute

RECOMPUTED_BIASES: Rule = (
    "--recompute-modules mlp with biases",
    lambda a: (
        a.recompute_granularity == "selective"
        and "mlp" in (a.recompute_modules or ())
        and a.add_bias_linear
    ),
    "add --disable-bias-linear, use core_attn alone, or --recompute-granularity full; "
    "Megatron's layers, local ones and Transformer Engine's, hand out the bias itself, which "
    "is then taken for a result of what is recomputed, and the backward pass does not end",
)
"""The one recompute that ends under no plan."""

NOT_WITH_CONTEXT_PARALLEL: tuple[Rule, ...] = (
    (
        "--qk-clip / --log-max-attention-logit",
        reports_logits,
        "leave them out, or use a plan without cp; attention to parts of sequences reports none",
    ),
    (
        "--sft / --dataloader-inter-document-masking",
        is_packed,
        "use a plan without cp; documents would have to be divided one by one",
    ),
    (
        "--mtp-num-layers",
        lambda a: a.mtp_num_layers is not None,
        "leave it out, or use a plan without cp",
    ),
    (
        "--reset-attention-mask",
        lambda a: a.reset_attention_mask,
        "leave it out, or use a plan without cp; its attention makes the causal mask itself",
    ),
    # Each rank routes a part of every sequence.
    (
        "--moe-expert-capacity-factor",
        lambda a: a.moe_expert_capacity_factor is not None,
        "leave it out, or use a plan without cp; each part of a sequence would drop by itself",
    ),
    (
        "--moe-router-load-balancing-type sinkhorn",
        lambda a: "sinkhorn" in a.moe_router_load_balancing_type,
        "use aux_loss, or a plan without cp; each part of a sequence would be balanced by itself",
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
"""Flags refused on a plan with context-parallel stages; `cost.choices` names the same, so that no
plan is searched for them."""


def _exchange(args: Any) -> str:
    """Return how Transformer Engine's attention gets keys and values of other ranks: a name for all
    layers, or one for each, of which the first stands for all."""
    found = args.cp_comm_type
    return (found[0] if isinstance(found, (list, tuple)) else found) or "p2p"


_NOT_WITH_FUSED_PARTS: tuple[Rule, ...] = (
    (
        "neither --bf16 nor --fp16",
        lambda a: not (a.bf16 or a.fp16),
        "use local layers, or a plan without cp; no kernel of Transformer Engine divides fp32",
    ),
    (
        "--attention-backend unfused",
        lambda a: getattr(a.attention_backend, "name", a.attention_backend) == "unfused",
        "use auto, local layers, or a plan without cp; Transformer Engine divides fused attention",
    ),
    # Assertions of `attn_forward_func_with_cp`.
    (
        "--softmax-type",
        lambda a: a.softmax_type != "vanilla" and _exchange(a) != "a2a",
        "add --cp-comm-type a2a, or use local layers, or a plan without cp",
    ),
    (
        "--window-size",
        lambda a: a.window_size is not None and _exchange(a) == "p2p",
        "add --cp-comm-type a2a or all_gather, or use a plan without cp",
    ),
)
"""Flags for which Transformer Engine has no kernel that divides sequences."""

NOT_WITH_CONTEXT_SHARES: tuple[Rule, ...] = (
    (
        "--num-experts",
        lambda a: a.num_experts is not None,
        "use equal shares; Megatron's routers take all ranks to have equally many tokens",
    ),
    (
        "--transformer-impl transformer_engine",
        lambda a: a.transformer_impl != "local",
        "use local, or equal shares; Transformer Engine divides sequences equally",
    ),
)
"""Flags refused on a plan with stages of unlike shares of sequences."""

NOT_WITH_CHUNKS: tuple[Rule, ...] = (
    (
        "--sft / --dataloader-inter-document-masking / --reset-attention-mask",
        lambda a: is_packed(a) or a.reset_attention_mask,
        "use a plan with one chunk on each stage; every chunk would have to read the batch",
    ),
)
"""Flags refused on a plan some of whose stages have several chunks of the model."""


def check_context_parallel(plan: Plan, args: Any) -> None:
    """Refuse flags that context-parallel stages cannot honour yet.

    Args:
        plan: the plan.
        args: Megatron's parsed arguments, or `given_arguments`.
    Raises:
        UnsupportedError: the message names every such flag, with advice.
    """
    if plan.layout.has_context_parallel:
        heading = "These flags do not go with the context parallelism (cp) of a plan:"
        refuse(NOT_WITH_CONTEXT_PARALLEL, args, heading)
    if plan.layout.has_uneven_context_parallel:
        heading = "These flags do not go with unlike shares of sequences (cp2(3:1)) in a plan:"
        refuse(NOT_WITH_CONTEXT_SHARES, args, heading)


def check_divided_attention(plan: Plan, args: Any) -> None:
    """Refuse divided sequences where Transformer Engine has no kernel for them on the plan's GPUs:
    it divides fused attention alone (`get_attention_backend`, 2.20).  `doctor` knows GPUs that only
    a cluster file describes, too.

    Args:
        plan: the plan.
        args: Megatron's parsed arguments, or `given_arguments`.
    Raises:
        UnsupportedError: the message names the flags, or the stage and its GPUs.
    """
    if args.transformer_impl == "local" or not plan.layout.has_context_parallel:
        return
    heading = "Transformer Engine cannot divide the sequences of the plan (cp) with these flags:"
    refuse(_NOT_WITH_FUSED_PARTS, args, heading)
    catalogue = set(gpu_type_names())
    for r, s, stage in stages(plan):
        names = {plan.type_by_device.get(device, "") for device in stage.devices} & catalogue
        gpus = map(gpu_type, sorted(names))
        for lacking in without_divided_attention(stage, gpus, plan.workload):
            raise UnsupportedError(
                f"replica {r}, stage {s} divides sequences (cp), which Transformer Engine does by "
                f"a fused kernel alone: {lacking}. Plan again, or use --transformer-impl local."
            )


def check_chunks(plan: Plan, args: Any) -> None:
    """Refuse flags that stages with several chunks of the model cannot honour yet.

    Args:
        plan: the plan.
        args: Megatron's parsed arguments, or `given_arguments`.
    Raises:
        UnsupportedError: the message names every such flag, with advice.
    """
    if any(len(stage.chunks) > 1 for r in plan.replicas for stage in r.stages):
        heading = "These flags do not go with several chunks of the model on a stage:"
        refuse(NOT_WITH_CHUNKS, args, heading)


def check_flags_of_job(plan: Plan, options: Sequence[Option]) -> None:
    """Refuse what the start would refuse for these reasons, when a plan becomes flags.

    Args:
        plan: a plan for the plug-in.
        options: the job's flags, each at most once; a plan of a bare layout has none.
    Raises:
        UnsupportedError: the message names the flags, with advice.
    """
    if not options:
        return
    args = given_arguments(options)
    check_context_parallel(plan, args)
    check_divided_attention(plan, args)
    check_chunks(plan, args)
    check_recompute(plan, args)


def check_recompute(plan: Plan, args: Any) -> None:
    """Refuse recompute with which no process trains, stock Megatron's neither: its backward pass
    does not end, and takes all memory.

    Args:
        plan: whose stages may recompute otherwise than the job's flags say.
        args: the job's, as Megatron parses them.
    Raises:
        UnsupportedError: the message names the flags, with advice.
    """
    for granularity in {recompute(plan, stage)[0] for _, _, stage in stages(plan)}:
        args.recompute_granularity = granularity
        refuse((RECOMPUTED_BIASES,), args, "The plan's job cannot train with these flags:")
