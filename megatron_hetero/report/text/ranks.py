"""Processes and their parts of a plan, as plain aligned text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.flags.launch import RankRow

HEADINGS = ("rank", "host", "GPU", "type", "replica", "stage", "tensor rank")
LEFT_ALIGNED = frozenset({"host", "type"})


def rank_lines(rows: Sequence[RankRow]) -> Iterator[str]:
    """Write a heading and one line for each global rank; `any` where the plan names no device.

    Context-parallel ranks are shown where there are any.
    """
    headings: tuple[str, ...] = HEADINGS
    # A column for context ranks only where some rank is not the first.
    cells = [_cells(row) for row in rows]
    if any(row.context_rank for row in rows):
        headings = (*HEADINGS, "context rank")
        cells = [(*c, str(row.context_rank)) for c, row in zip(cells, rows, strict=True)]
    cells = [headings, *cells]
    # Every column as wide as its widest cell.
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    for line in cells:
        aligned = (
            text.ljust(width) if heading in LEFT_ALIGNED else text.rjust(width)
            for heading, text, width in zip(headings, line, widths, strict=True)
        )
        yield "  ".join(aligned).rstrip()


def _cells(row: RankRow) -> tuple[str, ...]:
    gpu = "any" if row.gpu_index is None else str(row.gpu_index)
    places = (row.replica, row.stage, row.tensor_rank)
    return (str(row.rank), row.host or "any", gpu, row.gpu_type or "any", *map(str, places))
