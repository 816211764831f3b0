"""Refusals of unsupported features, by the name of the flag, before any process group exists.

`check_stock` and `check_entry` hold for jobs of stock Megatron too; all other functions are for
asymmetric plans alone. The rules themselves stand in `refused_flags` and `entry_flags` beside this
file, in `runtime.model` (`moe.experts`, `fp8`, `precision`) and in `flags.support`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.support.lookup import refused_by_presence, without_effect
from megatron_hetero.flags.support.of_plan import check_chunks, check_divided_attention
from megatron_hetero.flags.support.of_plan import check_context_parallel as check_divided_sequences
from megatron_hetero.flags.support.rules import Rule, refuse
from megatron_hetero.flags.support.tensor_overlap import check_tensor_overlap
from megatron_hetero.model.flag_table import Option
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.batches import global_batch_size
from megatron_hetero.runtime.job.checks.attention_variables import check_attention_variables
from megatron_hetero.runtime.job.checks.entry_flags import NOT_IN_THIS_ENTRY
from megatron_hetero.runtime.job.checks.refused_flags import (
    NOT_WITH_SHARDED_LAYERS,
    NOT_WITH_SPLIT_PASSES,
    REFUSED,
)
from megatron_hetero.runtime.model import fp8, precision
from megatron_hetero.runtime.model.moe import experts

_YARN_POSITIONS = 4096
"""Default of `MLATransformerConfig.original_max_position_embeddings`."""


def check_plan(plan: Plan) -> None:
    """Refuse parts of a valid plan, `with_micro_batch_sizes`, that this version cannot run.

    Raises:
        UnsupportedError: the message names every such part and its stage.
    """
    found = []
    batch = global_batch_size(plan)
    # Megatron's loop counts the global batch in the micro-batches of each replica.
    for r, replica in enumerate(plan.replicas):
        if batch % (replica.micro_batch_size or 1):
            found.append(
                f"replica {r}: micro-batches of {replica.micro_batch_size} sequences, which do not "
                f"divide the global batch of {batch} (Megatron counts in them)"
            )
    if found:
        raise UnsupportedError(
            "The plan is valid, but this version's runtime cannot run these parts of it yet:\n  "
            + "\n  ".join(found)
            + "\nLeave them out of the plan, or plan again without them."
        )
    precision.check_devices(plan)


def check_arguments(args: Any, plan: Plan) -> None:
    """Refuse Megatron flags that an asymmetric plan cannot honour yet.

    Raises:
        UnsupportedError: the message names every such flag, with advice.
    """
    # Devices of a stage stand in any order, so rank 0 may have any place of its group.
    if args.full_validation and rank_table(plan)[0].tensor_rank != 0:
        raise UnsupportedError(
            "--full-validation: Megatron asks rank 0 how long the sets are, and expects the first "
            "place of a tensor-parallel group there; the plan's rank 0 is another. List the "
            "devices of its stage with that node's first GPU first, or leave the flag out."
        )
    # Experts: their flags first, then what the plan says about them.
    if args.num_experts is not None:
        refuse(experts.REFUSED, args, "With --num-experts, an asymmetric plan cannot honour yet:")
        experts.check_micro_batches(plan, args)
        experts.check_tables(plan, args)
        experts.check_groups(plan, args)
    if args.fp8 is not None:
        refuse(fp8.REFUSED, args, "With --fp8-format, an asymmetric plan cannot honour:")
    if args.tp_comm_overlap:
        if not backend.cuda_is_usable():
            raise UnsupportedError(
                "--tp-comm-overlap: Transformer Engine exchanges tensors under products on NVIDIA "
                "GPUs alone, and this process has none. Leave the flag out."
            )
        check_tensor_overlap(plan, transformer_impl=args.transformer_impl, is_bf16=args.bf16)
    # The flag holds for the whole job: one stage with shares is enough.
    has_shares = any(stage.shape.shares for r in plan.replicas for stage in r.stages)
    if has_shares and args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te":
        raise UnsupportedError(
            "--cross-entropy-fusion-impl te: it takes all ranks to hold equally many rows of the "
            "vocabulary, which the plan's shares divide. Use native."
        )
    refuse(REFUSED, args, "These flags are not supported on an asymmetric plan yet:")


def check_context_parallel(plan: Plan, args: Any) -> None:
    """Refuse flags that context-parallel stages cannot honour yet.

    Raises:
        UnsupportedError: the message names every such flag, with advice.
    """
    check_divided_sequences(plan, args)
    # Without a GPU the kernels of Transformer Engine have counterparts that divide everything.
    if backend.cuda_is_usable():
        check_divided_attention(plan, args)
    _check_position_table(plan, args)


def check_own_lengths(plan: Plan, has_own_lengths: bool) -> None:
    """Refuse sequences of unlike lengths under unlike shares of sequences.

    A script asks for them after Megatron has parsed the flags.

    Args:
        plan: the plan.
        has_own_lengths: `variable_seq_lengths` of the model's configuration.
    Raises:
        UnsupportedError: the plan has such shares.
    """
    if has_own_lengths and plan.layout.has_uneven_context_parallel:
        raise UnsupportedError(
            "args.variable_seq_lengths does not go with unlike shares of sequences (cp2(3:1)) in a "
            "plan: leave it out, or use equal shares; a length says only in equal shares what a "
            "rank has."
        )


def _check_position_table(plan: Plan, args: Any) -> None:
    """Refuse a context-parallel size that does not cut YaRN's table of latent attention.

    Megatron makes the table when it builds the model, for `original_max_position_embeddings` of its
    `MLATransformerConfig`, and views it as two chunks for each context-parallel rank
    (`YarnRotaryEmbedding`). YaRN is what latent attention uses without `--rope-type`.
    """
    if not args.multi_latent_attention or args.rope_type == "rope":
        return
    length = getattr(args, "original_max_position_embeddings", None) or _YARN_POSITIONS
    sizes = {stage.shape.context_parallel for r in plan.replicas for stage in r.stages}
    unfit = sorted(size for size in sizes if size > 1 and length % (2 * size))
    if unfit:
        raise UnsupportedError(
            f"--multi-latent-attention with YaRN's positions and cp{unfit[0]}: Megatron cuts a "
            f"table of {length} positions into {2 * unfit[0]} equal chunks. Use --rope-type "
            "rope, or another context-parallel size."
        )


def check_sharded_layers(plan: Plan, args: Any) -> None:
    """Refuse flags that sharded layers cannot honour yet.

    Raises:
        UnsupportedError: the message names every such flag, with advice.
    """
    if plan.layout.has_sharded_layers:
        heading = "These flags do not go with the sharded layers (z) of a plan:"
        refuse(NOT_WITH_SHARDED_LAYERS, args, heading)


def check_precisions(plan: Plan, args: Any) -> None:
    """Refuse flags not yet supported beside stages in precisions of their own.

    Raises:
        UnsupportedError: the message names every such flag, with advice.
    """
    # All stages compute in the job's precision.
    if not any(precision.own_precisions(plan)):
        return
    if plan.layout.has_sharded_layers:
        raise UnsupportedError(
            "The plan has sharded layers (z) and stages with a `precision` of their own, which do "
            "not go together yet. Leave one of them out of the plan."
        )
    heading = "These flags do not go with the `precision` of single stages of a plan:"
    refuse(precision.REFUSED, args, heading)


def check_orders(plan: Plan, args: Any) -> None:
    """Refuse flags that orders with split backward passes (I and W), or with several chunks of the
    model on a stage, cannot honour yet.

    Raises:
        UnsupportedError: the message names every such flag, with advice.
    """
    # An order with I passes has W passes as well: looking for one kind is enough.
    split = any("I" in (stage.order or "") for r in plan.replicas for stage in r.stages)
    if split:
        refuse(NOT_WITH_SPLIT_PASSES, args, "These flags do not go with a plan's I and W passes:")
    check_chunks(plan, args)


def check_flags(options: Sequence[Option]) -> tuple[str, ...]:
    """Refuse flags on the command line that are unsupported with every value.

    Returns:
        A warning for each flag that changes nothing.
    Raises:
        UnsupportedError: the message names the flags to leave out.
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
    """Refuse flags that this entry follows only on asymmetric plans.

    Raises:
        UnsupportedError: the message names the flag, with advice.
    """
    rule: Rule = (
        "--context-parallel-size",
        lambda a: a.context_parallel_size > 1,
        "let a plan say it, as in --hetero-layout tp1cp2:4",
    )
    refuse((rule,), args, "megatron_hetero.pretrain_gpt cannot train without a plan with:")


def check_entry(args: Any) -> None:
    """Refuse Megatron flags that this entry does not follow under any plan.

    Raises:
        UnsupportedError: the message names every such flag, with advice.
        UsageError: the environment contradicts a flag.
    """
    check_attention_variables(args, os.environ)
    refuse(
        NOT_IN_THIS_ENTRY,
        args,
        "megatron_hetero.pretrain_gpt cannot train with these flags:",
    )
