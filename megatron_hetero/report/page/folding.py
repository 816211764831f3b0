"""Rows that look alike, of many: one is drawn, and says how many more it stands for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from megatron_hetero.report.page.figure import fitted

MAX_ROWS = 16
"""A figure of no more rows shows each."""
NEAR = 0.02
"""Fraction of a figure's width by which rows may differ and still be drawn as a single row."""


@dataclass(frozen=True)
class Folded[Row]:
    """Rows that look alike; the first is drawn."""

    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """Return the row that is drawn."""
        return self.rows[0]

    @property
    def num_more(self) -> int:
        """Count the rows beside the drawn one."""
        return len(self.rows) - 1


def folded[Row](
    rows: Sequence[Row],
    kind: Callable[[Row], Hashable],
    drawn: Callable[[Row], tuple[float, ...]],
    most: int = MAX_ROWS,
) -> list[Folded[Row]]:
    """Fold rows as they are drawn: of more than `most`, those that look alike are one.

    Args:
        kind: what must be equal in rows that look alike.
        drawn: where the parts of a row begin and end, in parts of the figure's width; those of rows
            that look alike are within `NEAR` of the first one's.
    """
    # Few rows are shown as they are.
    if len(rows) <= most:
        return [Folded((row,)) for row in rows]
    found: list[list[Row]] = []
    for row in rows:
        # The first group whose drawn row looks like this one.
        near = (members for members in found if _are_alike(members[0], row, kind, drawn))
        members = next(near, None)
        if members is None:
            found.append([row])
        else:
            members.append(row)
    return [Folded(tuple(members)) for members in found]


def runs[Row](
    rows: Sequence[Row],
    kind: Callable[[Row], Hashable],
    drawn: Callable[[Row], tuple[float, ...]],
) -> list[Folded[Row]]:
    """Join runs of neighbours that look alike (`folded`), in the order given."""
    found: list[list[Row]] = []
    for row in rows:
        if found and _are_alike(found[-1][0], row, kind, drawn):
            found[-1].append(row)
        else:
            found.append([row])
    return [Folded(tuple(members)) for members in found]


def label(place: str, num_more: int, of: str, width: float, size: float = 12) -> str:
    """Write the words beside a row: its place, the number of rows that look like it, and their
    kind."""
    more = f" and {num_more} alike" if num_more else ""
    return fitted(f"{place}{more}{of}", width, size)


def span(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Write a value of rows that look alike: one figure, or the least and the largest."""
    least, largest = shown(min(values)), shown(max(values))
    return least if least == largest else f"{least} to {largest}"


def _are_alike[Row](
    a: Row, b: Row, kind: Callable[[Row], Hashable], drawn: Callable[[Row], tuple[float, ...]]
) -> bool:
    return kind(a) == kind(b) and all(
        abs(x - y) <= NEAR for x, y in zip(drawn(a), drawn(b), strict=True)
    )
