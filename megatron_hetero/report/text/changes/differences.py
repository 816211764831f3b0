"""The differences of two plans as a table for a terminal: the step time first, like rows folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from megatron_hetero.plan.diff import MEMORY, Difference
from megatron_hetero.report.text.words import count, devices_by_node, ranges

MAX_KEY_WIDTH = 32
"""Places and names in a table of differences are not wrapped up to this many columns: two of them
leave 16 of 80."""
_MAX_MEMORY_ROWS = 4
"""Number of rows about memory above which all are joined into a single row."""
_PLACE_IN_STAGE = re.compile(r", tensor rank \d+(, context rank \d+)?$")


def difference_table(differences: Sequence[Difference]) -> Table:
    """Build a table with one row for each difference: where, what, before, after."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("where", "what"):
        # Places and names of flags are kept whole, and the values wrap, unless space is too short.
        width = max((len(getattr(d, heading)) for d in differences), default=0)
        table.add_column(heading, overflow="fold", no_wrap=width <= MAX_KEY_WIDTH)
    table.add_column("before", overflow="fold")
    table.add_column("after", overflow="fold")
    for d in differences:
        table.add_row(
            d.where,
            d.what,
            Text("-" if d.before is None else d.before, style="red"),
            Text("-" if d.after is None else d.after, style="green"),
        )
    return table


def folded(differences: Iterable[Difference]) -> list[Difference]:
    """Join rows that say the same of several places; the joined row stands where the first
    stood."""
    alike: dict[tuple[str, str | None, str | None], list[str]] = {}
    for d in differences:
        # GPUs that move together are one row, whatever their places in the group.
        places = [text and _PLACE_IN_STAGE.sub("", text) for text in (d.before, d.after)]
        if d.what != "moves" or places[0] == places[1]:
            places = [d.before, d.after]
        alike.setdefault((d.what, places[0], places[1]), []).append(d.where)
    rows = [Difference(_places(where), *key) for key, where in alike.items()]
    return list(_with_few_memories(rows, alike))


def _places(where: Sequence[str]) -> str:
    if len(where) == 1:
        return where[0]
    # GPUs by node, else replicas with the same stage, else the first place and a number.
    devices = [place.removeprefix("device ") for place in where]
    if all(len(device) < len(place) for device, place in zip(devices, where, strict=True)):
        return f"{count(len(devices), 'GPU')}, {devices_by_node(devices)}"
    stages = [place.partition(", ") for place in where]
    if all(r.startswith("replica ") and s == stages[0][2] for r, _, s in stages):
        numbers = ranges([int(r.removeprefix("replica ")) for r, _, _ in stages])
        return f"replicas {numbers}" + (f", {stages[0][2]}" if stages[0][2] else "")
    return f"{where[0]} and {len(where) - 1} more"


def _with_few_memories(
    rows: Sequence[Difference], alike: dict[tuple[str, str | None, str | None], list[str]]
) -> Iterator[Difference]:
    # Memory differs on most GPUs as soon as anything does: many rows say no more than one.
    memories = [row for row in rows if row.what == MEMORY]
    many = len(memories) > _MAX_MEMORY_ROWS
    for row in rows:
        if not (many and row.what == MEMORY):
            yield row
    if many:
        num = sum(len(where) for key, where in alike.items() if key[0] == MEMORY)
        yield Difference(f"{num} GPUs", MEMORY, "differs", "each in --json")
