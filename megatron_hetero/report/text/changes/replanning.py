"""Ways to go on with a plan on a changed cluster, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.replan.replanning import Replanned, Replanning
from megatron_hetero.units import format_bytes, format_duration


def replanning_lines(found: Replanning, old: Plan) -> Iterator[RenderableType]:
    """Show the ways to go on, sorted by the bytes to move, least first."""
    before = "" if old.estimates is None else format_duration(old.estimates.step_time_s)
    yield Text.assemble(
        ("Ways to go on", "bold"), f"  a step took {before} before" if before else ""
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("step", "to fetch", "takes", "pays after"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for index, way in enumerate(found.ways):
        chosen = index == found.chosen
        table.add_row(
            f"{index + 1}{' *' if chosen else ''}",
            format_duration(way.step_time_s),
            format_bytes(way.movement.moved_bytes),
            "-" if way.movement.time_s is None else format_duration(way.movement.time_s),
            _pays(way),
            Text(way.layout, style="green"),
        )
    yield Padding(table, (0, 0, 0, 1))
    notes = ["* is written with -o; to fetch: weights and optimizer state that a GPU does not hold"]
    lost = max(way.movement.lost_bytes for way in found.ways)
    # Without a rate of the store, ways that need it have no time.
    if lost:
        unknown = any(way.movement.time_s is None for way in found.ways)
        how_fast = " (--store-bandwidth says how fast)" if unknown else ""
        notes.append(
            f"up to {format_bytes(lost)} of it no GPU holds any more: a checkpoint has it{how_fast}"
        )
    yield Padding(Text("\n".join(notes), style="dim"), (0, 0, 1, 1))


def _pays(way: Replanned) -> str:
    if way.pays_after_steps is None:
        return ""
    return f"{way.pays_after_steps:,} steps" if way.pays_after_steps else "at once"
