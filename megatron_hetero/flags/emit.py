"""Megatron's argument vector of a plan, and its two renderings for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.decisions import Decision, hetero_decisions, stock_decisions
from megatron_hetero.flags.support.dealt_experts import check_dealt_experts_of_job
from megatron_hetero.flags.support.of_plan import check_flags_of_job
from megatron_hetero.flags.support.tensor_overlap import check_tensor_overlap_of_job
from megatron_hetero.model.flag_table import FlagTable, Option, flag_table, last_of_each
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import (
    common_micro_batch_size,
    is_stock,
    micro_batch_size,
    recompute,
)

__all__ = ["is_stock", "megatron_args", "render_bash"]

NOT_FROM_A_PLAN = {
    "--spec": "it imports the module that it names",
    "--fp8-quantizer-factory": "it imports the module that it names",
    "--fp4-quantizer-factory": "it imports the module that it names",
    "--trust-remote-code": "it runs code that comes with a tokenizer",
    "--yaml-cfg": "it replaces all flags by those of another file",
}
"""Flags that a plan file must not carry, because a stranger may have written the file."""


def megatron_args(
    plan: Plan, plan_path: str | None = None, *, in_our_runtime: bool = False
) -> tuple[str, ...]:
    """Return the arguments that follow the entry script: the user's flags, then the plan's.

    A plan that stock Megatron can express becomes stock flags only. Any other plan becomes the
    user's flags and `--hetero-layout`, or `--hetero-plan` where a layout cannot hold all of the
    plan.

    Args:
        plan: a valid plan.
        plan_path: path of the plan file on the machines of the job.
        in_our_runtime: a plan of stock Megatron becomes flags of the plug-in too.
    Raises:
        UsageError: a user's flag is unknown or contradicts the plan; `plan_path` is missing
            although the plan needs its file; or a bare stock layout gives no micro-batch size.
        UnsupportedError: the plug-in does not deal experts out over replicas, divide sequences,
            run several chunks, recompute, or exchange tensors under products with these flags.
    """
    table = flag_table()
    options = check_user_flags(() if plan.workload is None else plan.workload.megatron_args)
    # Stock Megatron: its own flags say everything.
    if is_stock(plan) and not in_our_runtime:
        _need_micro_batch_size(plan)
        options = _without_overridden(plan, options, of_stock=True)
        decided = _settle(table, options, tuple(stock_decisions(plan)))
        return tokens_of((*options, *decided))
    # The plug-in: what its runtime could not follow is refused before the start.
    check_dealt_experts_of_job(plan)
    check_tensor_overlap_of_job(plan)
    options = _without_overridden(plan, options, of_stock=False)
    check_flags_of_job(plan, options)
    decided = _settle(table, options, tuple(hetero_decisions(plan)))
    return (*tokens_of((*options, *decided)), *_hetero_flag(plan, plan_path))


def check_user_flags(megatron_args: Sequence[str]) -> tuple[Option, ...]:
    """Return the last occurrence of each flag of the user, after checks that hold for every plan.

    Raises:
        UsageError: a flag is unknown to Megatron, has wrong values, or may not stand in a plan.
    """
    options = last_of_each(flag_table().split(megatron_args))
    _refuse_foreign(options)
    return options


def plan_arguments(
    plan: Plan, given: Sequence[str], *, in_our_runtime: bool = False
) -> tuple[str, ...]:
    """Return the Megatron flags that a plan adds to a command line of the user's.

    Args:
        given: that command line without its `--hetero-` flags.
        in_our_runtime: as `megatron_args`.
    Raises:
        UsageError: a flag of `given` is unknown or contradicts the plan.
    """
    table = flag_table()
    options = last_of_each(table.split(tuple(given)))
    # The command line's size counts where the plan leaves the size open.
    size = next((int(o.values[0]) for o in options if o.name == "--micro-batch-size"), None)
    is_stocks = is_stock(plan) and not in_our_runtime
    decisions = (stock_decisions if is_stocks else hetero_decisions)(plan, size)
    settled = _settle(table, options, tuple(decisions))
    return tokens_of((*settled, *_chosen_dispatcher(plan, options)))


def _chosen_dispatcher(plan: Plan, given: Sequence[Option]) -> Iterator[Option]:
    """Yield the dispatcher of tokens that the plan is priced with, where the user names none: the
    planner may have chosen it."""
    if plan.workload is None or any(option.name == _DISPATCHER for option in given):
        return
    options = last_of_each(flag_table().split(plan.workload.megatron_args))
    yield from (option for option in options if option.name == _DISPATCHER)


def render_bash(argv: Sequence[str], name: str = "MEGATRON_ARGS") -> str:
    """Return a bash array with a flag and its values on each line, for use as `"${NAME[@]}"`."""
    lines: list[list[str]] = []
    for token in argv:
        # A flag begins a line, and its values follow on the same line.
        if token.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(token)
    return "\n".join([f"{name}=(", *(f"    {shlex.join(line)}" for line in lines), ")"])


_DISPATCHER = "--moe-token-dispatcher-type"
_RECOMPUTE_FLAGS = frozenset(
    {
        "--recompute-activations",
        "--recompute-granularity",
        "--recompute-method",
        "--recompute-num-layers",
    }
)


def _without_overridden(
    plan: Plan, options: Sequence[Option], *, of_stock: bool
) -> tuple[Option, ...]:
    """Drop the user's flags that the plan replaces: micro-batch size and recompute.

    A plan for the plug-in carries its settings in its file: the size stays where some replica has
    the job's, and recompute where some stage has.
    """
    if plan.workload is None:
        return tuple(options)
    training = plan.workload.training
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    # (granularity, number of layers) of every stage.
    kinds = {recompute(plan, stage) for stage in stages}
    overridden: set[str] = set()
    # The plan's own size takes the place of the job's.
    if common_micro_batch_size(plan) not in (None, training.micro_batch_size):
        overridden.add("--micro-batch-size")
    if kinds != {(training.recompute, None)} and (of_stock or all(s.recompute for s in stages)):
        overridden |= _RECOMPUTE_FLAGS
    return tuple(option for option in options if overridden.isdisjoint(option.flag.names))


def tokens_of(options: Sequence[Option]) -> tuple[str, ...]:
    """Return the command-line words of the options."""
    return tuple(token for option in options for token in option.tokens)


def _refuse_foreign(options: Sequence[Option]) -> None:
    for option in options:
        reason = NOT_FROM_A_PLAN.get(option.name)
        if reason is not None:
            raise UsageError(
                f"the plan's Megatron flags hold {option}: {reason}, so a plan may not carry it. "
                "Take it out of the model's flags and add it to your own command line."
            )


def _settle(
    table: FlagTable, options: Sequence[Option], decisions: Sequence[Decision]
) -> tuple[Option, ...]:
    """Return the options to add to the user's; refuse user's options that contradict a decision."""
    # By argparse's destination, because a flag may have several names.
    given = {option.flag.dest: option for option in options}
    added = []
    # Megatron takes a global batch size or a schedule of batches, not both.
    has_schedule = "step_batch_size_schedule" in given
    for decision in decisions:
        if has_schedule and decision.name == "--global-batch-size":
            continue
        option = given.get(table.by_name[decision.name].dest)
        # The user has not said it: only flags that Megatron needs are added.
        if option is None:
            if decision.printed and decision.values is not None:
                added.append(table.option(decision.name, *decision.values))
        elif decision.values is None or not _agrees(option, decision.values):
            remedy = (
                "Remove the flag" if decision.values is None else "Remove the flag or change it"
            )
            raise UsageError(
                f"{option} contradicts the plan, which has {decision.meaning}. {remedy}, or plan "
                "again."
            )
    return tuple(added)


def _agrees(option: Option, values: tuple[str, ...]) -> bool:
    # "08" and "8" are one number.
    if option.flag.type == "int":
        return [int(value) for value in option.values] == [int(value) for value in values]
    return option.values == values


def _need_micro_batch_size(plan: Plan) -> None:
    if any(micro_batch_size(plan, replica) is None for replica in plan.replicas):
        count = plan.replicas[0].num_micro_batches
        raise UsageError(
            "the layout does not say how many sequences a micro-batch has, and stock Megatron "
            f"counts in sequences: write '@{count}xSIZE', or give the model's Megatron flags with "
            "--micro-batch-size."
        )


def _hetero_flag(plan: Plan, plan_path: str | None) -> tuple[str, ...]:
    # A layout on the command line needs no file on the machines.
    if not _says_more_than_a_layout(plan):
        return ("--hetero-layout", format_layout(plan.layout))
    if plan_path is None:
        raise UsageError(
            "this plan names devices or settings of single stages, which a layout cannot hold: "
            "save it to a file and give its path."
        )
    # With `=`, so that argparse takes the path for a value.
    if plan_path.startswith("-"):
        return (f"--hetero-plan={plan_path}",)
    return ("--hetero-plan", plan_path)


def _says_more_than_a_layout(plan: Plan) -> bool:
    return bool(plan.hosts) or any(
        value is not None
        for replica in plan.replicas
        for stage in replica.stages
        for value in (
            stage.recompute,
            stage.precision,
            stage.num_launched_forwards,
            stage.order,
            stage.optimizer_share,
        )
    )
