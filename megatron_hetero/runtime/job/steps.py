"""The three steps of a training job, the same for every entry: parse, configure, train.

A pre-training script of Megatron parses its flags (`parse_and_validate_args`), turns them into a
model's configuration (`gpt_config_from_args`) and calls `pretrain`. A job stands for these three
calls on one rank: `runtime.job.entry` makes them itself, `runtime.job.hook` puts them in their
places in a script of the user's own. `StockJob` leaves everything to stock Megatron;
`AsymmetricJob` adds the plan's groups, boundaries, gradient sync and data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.flags.emit import plan_arguments
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import NO_TRANSFORMER_ENGINE, backend
from megatron_hetero.runtime.faults.drill import arm
from megatron_hetero.runtime.job.agreement import agreed_items
from megatron_hetero.runtime.job.arguments import (
    HeteroArguments,
    requested_plan,
    split_arguments,
)
from megatron_hetero.runtime.job.asymmetric import AsymmetricJob
from megatron_hetero.runtime.job.meeting import MEETING
from megatron_hetero.runtime.job.stock import Step, StockJob
from megatron_hetero.runtime.job.world import World, check_world
from megatron_hetero.runtime.transformer_engine import layers
from megatron_hetero.schedule.stock import is_stock


class TrainingJob(Protocol):
    """The three calls of a pre-training script; each takes Megatron's own function first."""

    def parse(self, parse_and_validate_args: Step, **given: Any) -> Any:
        """Return Megatron's arguments of this rank; refusals by flags happen here, before any
        process group exists."""
        ...

    def configure(self, gpt_config_from_args: Step, args: Any, **given: Any) -> Any:
        """Return the configuration of the model that this rank builds."""
        ...

    def pretrain(self, pretrain: Step, config: Any, *given: Any, **named: Any) -> Any:
        """Train in Megatron's own loop."""
        ...


def job_of(
    argv: Sequence[str], of_a_script: bool = False, *, in_our_runtime: bool = False
) -> TrainingJob:
    """Return the job of a command line; activate the CPU backend where there is no GPU.

    Args:
        argv: the command line.
        of_a_script: flags that Megatron does not know are a script's own, for its parser.
        in_our_runtime: train there also on a plan that stock Megatron runs.
    Raises:
        HeteroError: the plan, its flags or the number of processes are wrong.
    """
    arguments = split_arguments(argv)
    if arguments.sequences is not None:
        return _sequences_job(arguments, of_a_script)
    judged = arguments
    if of_a_script:
        judged = replace(arguments, megatron=flag_table().known_part(arguments.megatron))
    plan = requested_plan(judged)
    return job_on_plan(plan, arguments, judged.megatron, in_our_runtime=in_our_runtime)


def _sequences_job(arguments: HeteroArguments, of_a_script: bool) -> TrainingJob:
    if of_a_script:
        raise UnsupportedError(
            "--hetero-sequences: a script's own batches are of one length. Train with -m "
            "megatron_hetero.pretrain_gpt."
        )
    if arguments.timeline is not None:
        raise UnsupportedError("--hetero-timeline does not go with --hetero-sequences yet")
    if arguments.faults.is_replanned:
        raise UnsupportedError("--hetero-on-loss replan does not go with --hetero-sequences yet")
    from megatron_hetero.runtime.job.flexible_sequences import sequences_plan

    return job_on_plan(sequences_plan(arguments), arguments, arguments.megatron)


def job_on_plan(
    plan: Plan | None,
    arguments: HeteroArguments,
    judged: Sequence[str],
    *,
    in_our_runtime: bool = False,
) -> TrainingJob:
    """Return the job of a plan that is read already.

    Args:
        plan: the plan; None for stock Megatron.
        arguments: our flags, and all others.
        judged: those of `arguments.megatron` that Megatron knows, which the plan must not
            contradict; a script has flags of its own besides.
        in_our_runtime: as `job_of`.
    Raises:
        HeteroError: the number of processes or the flags are wrong.
    """
    # What holds for every job: a drill, and the number of processes.
    world = World.from_environment()
    if arguments.faults.drill is not None:
        arm(arguments.faults.drill, world.rank, world.size)
    if plan is not None:
        check_world(plan, world)
    # Without a GPU, Megatron runs on the CPU backend with flags for it.
    if not backend.cuda_is_usable():
        if world.rank == 0:
            print(f"> layers: {layers.said(judged)}", flush=True)
            _say_what_a_cpu_changes(judged)
        flags = layers.cpu_flags(judged)
        backend.activate_cpu_backend()
        arguments = replace(arguments, megatron=(*arguments.megatron, *flags))
    # Without Transformer Engine, local layers stand in.
    elif NO_TRANSFORMER_ENGINE is not None and not _names_layers(arguments.megatron):
        if world.rank == 0:
            print(f"> no Transformer Engine: {NO_TRANSFORMER_ENGINE}; local layers", flush=True)
        arguments = replace(arguments, megatron=(*arguments.megatron, "--transformer-impl=local"))
    # Every rank must have the same plan and flags.
    MEETING.bring(agreed_items(plan, arguments))
    # No plan: stock Megatron with the user's flags.
    if plan is None:
        if arguments.timeline is not None:
            raise UsageError(
                "--hetero-timeline needs a plan (--hetero-plan or --hetero-layout), which says "
                "what every rank does"
            )
        return StockJob(arguments.megatron, world, faults=arguments.faults)
    # Dealt sequences have a job of their own.
    if arguments.sequences is not None:
        from megatron_hetero.runtime.job.flexible_sequences import SequencesJob

        return SequencesJob(plan, arguments, world)
    # A plan within Megatron's own flags goes to stock Megatron, unless our runtime is asked for.
    divides = plan.layout.has_context_parallel and _has_local_layers(arguments.megatron)
    if is_stock(plan) and not (in_our_runtime or arguments.faults.is_replanned or divides):
        decided = plan_arguments(plan, judged)
        if world.rank == 0:
            print(f"> this plan is stock Megatron's own: {' '.join(decided)}", flush=True)
        megatron = (*arguments.megatron, *decided)
        return StockJob(megatron, world, arguments.init, plan, arguments.timeline, arguments.faults)
    return AsymmetricJob(plan, arguments, world)


def _say_what_a_cpu_changes(judged: Sequence[str]) -> None:
    """Print the user's flags with values replaced on a CPU."""
    there = {o.name: o.values for o in flag_table().split(layers.cpu_flags(judged)) if o.values}
    for option in last_of_each(flag_table().split(flag_table().known_part(judged))):
        instead = there.get(option.name, option.values)
        if instead != option.values:
            print(f"> no GPU: {option} becomes {' '.join(instead)}", flush=True)


def _has_local_layers(megatron: Sequence[str]) -> bool:
    """Return whether layers are Megatron's own; stock Megatron does not divide sequences in these.
    """
    options = last_of_each(flag_table().split(flag_table().known_part(megatron)))
    return any(o.name == "--transformer-impl" and o.values == ("local",) for o in options)


def _names_layers(megatron: Sequence[str]) -> bool:
    return any(token.partition("=")[0] == "--transformer-impl" for token in megatron)
