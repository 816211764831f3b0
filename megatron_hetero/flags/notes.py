"""What a plan does not take over from a job's script, and what it changes, in lines for people."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_hetero.model.spec import Unread
from megatron_hetero.plan.plan import Plan

LOSES_WORK = ("--save", "--load", "--data-path")
"""Flags without which a job starts all the same, and trains something else or keeps nothing."""


def unread_parts(plan: Plan, more: Collection[str] = ()) -> tuple[Unread, ...]:
    """Return what only running the script would tell, but for flags that are given elsewhere.

    Args:
        more: words of a command line, beside those that the plan remembers.
    """
    if plan.workload is None:
        return ()
    words = (*plan.workload.megatron_args, *more)
    given = {word.partition("=")[0] for word in words}
    return tuple(part for part in plan.workload.unread if part.name not in given)


def plan_notes(plan: Plan) -> tuple[str, ...]:
    """Return the notes of a plan, for `plan`, `flags` and their `--json`."""
    return tuple(_notes(plan))


def _notes(plan: Plan) -> Iterator[str]:
    if plan.workload is None:
        return
    _, bracket, vocabulary = plan.workload.source.partition(" (vocabulary of ")
    if bracket:
        yield f"vocabulary of {vocabulary.removesuffix(')')}"
    parts = unread_parts(plan)
    yield from map(str, parts)
    if any(part.name.startswith("--") for part in parts):
        yield "give such flags after --, or write their values into the script, and plan again"
