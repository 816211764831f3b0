"""Flags of a job that the plan does not keep: notes, another objective and refusals, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.text import Text

from megatron_hetero.flags.growing_batches import undivided_batches
from megatron_hetero.flags.notes import plan_notes, refused_words, unknown_words, unread_parts
from megatron_hetero.flags.other_objective import other_objective
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan

MOST_UNREAD = 5
"""Lines about parts of a script that are not read; `doctor` has all of them."""


def note_lines(
    plan: Plan, job: Workload | None = None, places: Mapping[str, str] | None = None
) -> Iterator[RenderableType]:
    """Show what the plan leaves out of the job's script or changes, and a changed objective.

    Args:
        job: the job that was planned, by default the plan's.
        places: file and line of each flag, where they are known.
    """
    notes = plan_notes(plan, job, places, MOST_UNREAD)
    # Notes first; a changed objective stands alone and in colour.
    for note in notes:
        yield Text.assemble(("note  ", "cyan"), note)
    if notes:
        yield Text()
    other = other_objective(plan)
    if other is not None:
        yield Text(f"ANOTHER OBJECTIVE: {other}.\n", style="yellow")


def refusal_lines(plan: Plan, has_stock: bool = True) -> Iterator[RenderableType]:
    """Show what is refused at start-up; nothing where the job may start with its flags.

    Args:
        has_stock: some plan of stock Megatron fits.
    """
    batches, words = undivided_batches(plan), refused_words(plan, has_stock)
    if words:
        yield Text(words, style="bold red")
    unknown = unknown_words(unread_parts(plan))
    if unknown:
        yield Text(unknown, style="bold red")
    if batches:
        yield Text(
            f"REFUSED at start-up on this plan: batches of {', '.join(map(str, batches))} in "
            "--step-batch-size-schedule, of which some replica's part is no whole number of "
            "micro-batches. Choose others, or limits.num_replicas: 1 and plan again.",
            style="bold red",
        )
