"""Machines to add to a cluster first, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.planner.advise.what_if import WhatToAdd
from megatron_hetero.units import format_duration


def what_if_lines(what: WhatToAdd, step_time_s: float) -> Iterator[RenderableType]:
    """Show the additions, the best first.

    Args:
        what: the additions, and the step without any.
        step_time_s: of the plan that is explained.
    """
    now = f"  the step takes {format_duration(step_time_s)} now"
    if what.is_planned_anew:
        now += (
            f"; the same machines, planned anew for the fastest step, take "
            f"{format_duration(what.step_time_s)}, and savings count from there"
        )
    yield Text.assemble(("What to add first", "bold"), now)
    found = what.additions
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("with", overflow="fold")
    # A column for money only where some addition has a price.
    priced = any(w.price_per_hour is not None for w in found)
    for heading in ("step", "saves", *(["an hour"] if priced else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for w in found:
        # An addition that promised too little was not planned: only its promise is known.
        if w.step_time_s is None or w.gain is None:
            row = [w.what, f"~ {format_duration(w.promised_step_s)}", "not planned"]
        else:
            row = [w.what, format_duration(w.step_time_s), f"{w.gain:.1%}"]
        if priced:
            row.append("" if w.price_per_hour is None else f"{w.price_per_hour:,.2f}")
        table.add_row(*row)
    yield Padding(table, (0, 0, 0, 1))
    if any(w.step_time_s is None for w in found):
        yield Text(
            " ~ a first look: the lower bound with the node, or "
            f"{'that' if what.is_planned_anew else 'this'} plan with the faster links",
            style="dim",
        )
