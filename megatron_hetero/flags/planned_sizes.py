"""Sizes of the model and batch that a plan was made for, beside those that flags describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from megatron_hetero.errors import ModelError, UsageError
from megatron_hetero.model.arguments import JobText, command_line_words, group_arguments
from megatron_hetero.model.megatron_flags import workload_from_arguments
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import common_micro_batch_size

_PLANNED_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "gated_mlp",
    "tied_embeddings",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "mtp_num_layers",
)
_PLANNED_TRAINING = ("global_batch_size", "micro_batch_size", "precision", "sequence_parallel")


def differing_sizes(plan: Plan, workload: Workload) -> tuple[str, ...]:
    """Return each size in which flags describe another job than a plan was made for, with both
    values."""
    if plan.workload is None:
        return ()
    # Sizes that the plan was made for; all other flags are the user's to change.
    planned, training = plan.workload.model, plan.workload.training
    pairs = [
        (field, getattr(planned, field), getattr(workload.model, field)) for field in _PLANNED_MODEL
    ] + [
        (field.name, getattr(training, field.name), getattr(workload.training, field.name))
        for field in fields(workload.training)
        if field.name in _PLANNED_TRAINING
    ]
    # Where all replicas have one size of their own, `flags` writes it in the place of the job's.
    also = {("micro_batch_size", common_micro_batch_size(plan))}
    return tuple(
        f"{name}: plan {a}, flags {b}" for name, a, b in pairs if a != b and (name, b) not in also
    )


def own_flags_differ(plan: Plan, source: str) -> tuple[str, ...]:
    """Return `differing_sizes` of a plan's own `megatron_args`, which an edit may have changed;
    nothing where these do not describe a whole model."""
    job = _own_job(plan, source)
    return () if job is None else differing_sizes(plan, job)


def check_more_flags(plan: Plan, more: Sequence[str]) -> None:
    """Refuse flags added to a plan's own that make it another job, such as `--seq-length`: stock
    Megatron would train that job, and nothing would say so.

    Nothing is refused where the plan's own flags do not describe a whole model.

    Raises:
        UsageError: the message names every size that differs, with both values.
        ModelError: the added flags contradict the plan's own.
    """
    source = "the plan's flags with those of the command line"
    if plan.workload is None or not more or _own_job(plan, source) is None:
        return
    differing = differing_sizes(plan, _job_of_flags(plan.workload, source, more))
    if differing:
        raise UsageError(
            f"{' '.join(more)}: with these flags the job is not the one that the plan was made for "
            f"({'; '.join(differing)}). Leave out what changes it, or plan again with it."
        )


def _own_job(plan: Plan, source: str) -> Workload | None:
    """Read the job that a plan's own flags describe; None where they describe no whole model."""
    try:
        return None if plan.workload is None else _job_of_flags(plan.workload, source)
    except ModelError:
        return None


def _job_of_flags(planned: Workload, source: str, more: Sequence[str] = ()) -> Workload:
    """Read the job that a plan's own flags describe, with `more` behind them, which win."""
    words = [*planned.megatron_args, *more]
    if "--vocab-size" not in words:
        # The tokenizer that tells it may be on another machine.
        words += ["--vocab-size", str(planned.model.vocab_size)]
    job = JobText(source, group_arguments(command_line_words(words)))
    return workload_from_arguments(job, is_planned=False)
