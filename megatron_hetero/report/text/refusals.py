"""Flags of a job that its plan does not keep: refusals and another objective, as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from megatron_hetero.flags.growing_batches import undivided_batches
from megatron_hetero.flags.notes import plan_notes
from megatron_hetero.flags.other_objective import other_objective
from megatron_hetero.flags.support.lookup import refused_options
from megatron_hetero.plan.plan import Plan


def refusal_lines(plan: Plan) -> Iterator[RenderableType]:
    """Show the flags refused at start-up, what the plan leaves out of the script, and a changed
    objective; nothing where the job may start with its flags, and trains what they say."""
    options, batches = refused_options(plan), undivided_batches(plan)
    if options:
        names = ", ".join(map(str, options))
        yield Text(
            f"REFUSED at start-up on this plan: {names}. Take them out of the script and plan "
            "again, or plan with --strategy stock (docs/megatron-flags.md).\n",
            style="bold red",
        )
    if batches:
        yield Text(
            f"REFUSED at start-up on this plan: batches of {', '.join(map(str, batches))} in "
            "--step-batch-size-schedule, of which some replica's part is no whole number of "
            "micro-batches. Choose others, or limits.num_replicas: 1 and plan again.\n",
            style="bold red",
        )
    for note in plan_notes(plan):
        yield Text.assemble(("note  ", "cyan"), note)
    if plan_notes(plan):
        yield Text()
    other = other_objective(plan)
    if other is not None:
        yield Text(f"ANOTHER OBJECTIVE: {other}.\n", style="yellow")
