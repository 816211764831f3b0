"""What benchmarks find, printed while it is found: Markdown tables and lines, or a list as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

Row = Mapping[str, Any]
Cell = str | Callable[[Any], str]
Option = tuple[tuple[str, ...], dict[str, Any]]


class Columns(dict[str, Cell]):
    """Titles of a table, each with its cells: a format of a row's values, or a function of a row.

    A value that is None is shown as "-".
    """

    @classmethod
    def of(cls, titles: Iterable[str]) -> Columns:
        """Return titles alone, for rows that come as cells."""
        return cls(dict.fromkeys(titles, ""))

    def cells(self, row: Row) -> list[str]:
        """Return the cells of a row."""
        return [_DASHES.vformat(cell, (), row) if isinstance(cell, str) else cell(row)
                for cell in self.values()]  # fmt: skip


class Failure(str):
    """A last line of text that makes the exit status 1."""


class _Dashes(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else super().format_field(value, format_spec)


_DASHES = _Dashes()
Found = Iterable[Columns | Row | Sequence[str] | str]
"""What a benchmark yields: titles before the rows below them, rows, lines."""


def show(found: Found, *, as_json: bool = False) -> int:
    """Print what a benchmark yields; return the exit status.

    Args:
        found: titles before the rows below them, rows (mappings, or cells) and lines.
        as_json: whether rows are printed as one list at the end, and nothing else.
    """
    columns, status, is_inside = Columns(), 0, False
    rows: list[dict[str, Any] | list[str]] = []
    for item in found:
        status |= isinstance(item, Failure)
        if isinstance(item, Columns):
            columns = item
        elif isinstance(item, Mapping):
            rows.append(dict(item))
        elif not isinstance(item, str):
            rows.append(list(item))
        if as_json:
            continue
        if isinstance(item, str):
            print(f"\n{item}" if is_inside else item, flush=True)
        elif isinstance(item, Columns):
            print(("\n" if is_inside else "") + _titles(item), flush=True)
        else:
            print(_line(columns.cells(item) if isinstance(item, Mapping) else item), flush=True)
        is_inside = not isinstance(item, str)
    if as_json:
        print(json.dumps(rows, indent=2))
    return status


def _titles(columns: Iterable[str]) -> str:
    titles = list(columns)
    return f"{_line(titles)}\n| --- |{' --: |' * (len(titles) - 1)}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def option(*names: str, **settings: Any) -> Option:
    """Return an option of a benchmark's command line, as `add_argument` takes it."""
    return names, settings


def only(what: str = "jobs") -> Option:
    """Return `--only TEXT ...`, which chooses by name (`is_chosen`)."""
    return option("--only", nargs="+", metavar="TEXT", help=f"{what} whose name contains one")


def is_chosen(name: str, only: Sequence[str] | None) -> bool:
    """Return whether a name contains one of some texts; any name does if none are given."""
    return not only or any(text in name for text in only)
