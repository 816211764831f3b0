"""Schedules that a job's Megatron flags rule out, and why."""

from __future__ import annotations

from megatron_hetero.model.arguments import Argument, command_line_words, group_arguments
from megatron_hetero.model.spec import Workload

_GROWING = "--step-batch-size-schedule"
_NOT_IN_CHUNKS = ("--sft", "--dataloader-inter-document-masking", "--reset-attention-mask")
"""Flags that the runtime refuses where a stage has several chunks
(`flags.support.of_plan.NOT_WITH_CHUNKS`)."""


def why_not_split(workload: Workload) -> str:
    """Explain why the job cannot run backward passes in two parts (`runtime.job.support`); empty
    where it can, or where it brings no flags that say."""
    # The last of repeated flags counts, as in argparse.
    given = {argument.flag: argument for argument in _flags(workload)}
    layers = given.get("--transformer-impl")
    if given and not (layers and [word.text for word in layers.values] == ["local"]):
        return (
            "it splits backward passes, for which only --transformer-impl local has layers that "
            "can put off weight gradients"
        )
    # With buckets ready after a backward pass, put-off weight gradients would be missing.
    if workload.training.overlap_grad_reduce:
        return (
            "it splits backward passes, and --overlap-grad-reduce takes a gradient for complete "
            "when its backward pass is"
        )
    return ""


def why_no_orders(workload: Workload) -> str:
    """Explain why the job runs 1F1B only (`runtime.batches`); empty where it does not."""
    if any(argument.flag == _GROWING for argument in _flags(workload)):
        return f"{_GROWING}: orders are for one number of micro-batches"
    return ""


def why_not_in_chunks(workload: Workload) -> str:
    """Explain why no stage of the job can have several chunks (`flags.support.of_plan`); empty
    where one can."""
    given = {argument.flag for argument in _flags(workload)}
    for flag in _NOT_IN_CHUNKS:
        if flag in given:
            return f"{flag}: every chunk of a stage would have to read the batch"
    return ""


def _flags(workload: Workload) -> tuple[Argument, ...]:
    return group_arguments(command_line_words(workload.megatron_args))
