"""Traces of requests as they are published: a line a request, never more than a number of them.

csv       arrival_s,input_tokens,output_tokens (ours)
azure     TIMESTAMP,ContextTokens,GeneratedTokens (AzurePublicDataset, LLM inference 2023 and 2024)
burstgpt  Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type (BurstGPT)
mooncake  a JSON object a line: timestamp in ms, input_length, output_length (Mooncake, FAST'25)
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_hetero.errors import FileFormatError
from megatron_hetero.files import read_text
from megatron_hetero.files.document import DocumentBuilder
from megatron_hetero.files.parsing import feed_json

Row = tuple[float, int, int]
"""Arrival (seconds from any moment), input tokens, output tokens."""

_MAX_TOKENS = 4_000_000
_COLUMNS: Mapping[str, tuple[str, str, str]] = {
    "csv": ("arrival_s", "input_tokens", "output_tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "mooncake": ("timestamp", "input_length", "output_length"),
}

_MOMENTS = {
    "csv": "a number of seconds", "burstgpt": "a number of seconds",
    "azure": "a moment such as 2023-11-16 18:15:46.6805900", "mooncake": "a number of milliseconds",
}  # fmt: skip


def read_trace(path: Path | str, kind: str) -> tuple[Row, ...]:
    """Read a trace.  Requests that failed there (no output) are left out.

    Args:
        path: a file of at most 16 MiB.
        kind: one of `csv`, `azure`, `burstgpt`, `mooncake`.
    Raises:
        FileFormatError: a line is malformed, or no request is left; with file and line.
    """
    path = Path(path)
    text = read_text(path)
    lines = _json_lines(path, text) if kind == "mooncake" else _csv_lines(path, text, kind)
    reads: Callable[[str], float] = _moment if kind == "azure" else float
    # Mooncake counts in milliseconds.
    factor = 1e-3 if kind == "mooncake" else 1.0
    rows = []
    for number, (when, num_input, num_output) in lines:
        column, cell = _COLUMNS[kind][0], when
        try:
            arrival_s = factor * reads(str(when))
            column, cell = _COLUMNS[kind][1], num_input
            tokens = int(str(num_input)), 0
            column, cell = _COLUMNS[kind][2], num_output
            tokens = tokens[0], int(str(num_output))
        except ValueError:
            wanted = _MOMENTS[kind] if column == _COLUMNS[kind][0] else "a whole number of tokens"
            raise FileFormatError(
                f"{path}:{number}: {column} is {str(cell)[:40]!r}; it has to be {wanted}"
            ) from None
        if not math.isfinite(arrival_s):
            raise FileFormatError(f"{path}:{number}: the time {when} is not finite")
        # A request without output has failed where the trace was taken.
        if tokens[1] == 0:
            continue
        if not all(1 <= n <= _MAX_TOKENS for n in tokens):
            raise FileFormatError(
                f"{path}:{number}: {tokens[0]} input and {tokens[1]} output tokens; each is from 1 "
                f"to {_MAX_TOKENS}"
            )
        rows.append((arrival_s, *tokens))
    if len(rows) < 2:
        raise FileFormatError(f"{path}: {len(rows)} requests; a trace has two or more")
    # Rows keep the order of the file; the loader sorts.
    return tuple(rows)


def _csv_lines(path: Path, text: str, kind: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
    reader = csv.reader(io.StringIO(text))
    header = next(reader, [])
    wanted = _COLUMNS[kind]
    places = [header.index(name) if name in header else -1 for name in wanted]
    if -1 in places:
        lacking = wanted[places.index(-1)]
        raise FileFormatError(
            f'{path}:1: there is no column "{lacking}"; a trace of the format {kind} has '
            f"{', '.join(wanted)}"
        )
    try:
        for cells in reader:
            if not cells:
                continue
            if len(cells) <= max(places):
                raise FileFormatError(f"{path}:{reader.line_num}: {len(cells)} columns are too few")
            yield reader.line_num, tuple(cells[place].strip() for place in places)
    except csv.Error as error:
        raise FileFormatError(f"{path}:{reader.line_num}: {error}") from None


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        builder = DocumentBuilder(path)
        try:
            feed_json(builder, line)
        except FileFormatError as error:
            raise FileFormatError(f"{path}:{number}: {str(error).partition(': ')[2]}") from None
        data = builder.document().data
        lacking = [
            key for key in _COLUMNS["mooncake"] if not isinstance(data, dict) or key not in data
        ]
        if lacking:
            raise FileFormatError(f'{path}:{number}: there is no "{lacking[0]}"')
        yield number, tuple(data[key] for key in _COLUMNS["mooncake"])


def _moment(text: str) -> float:
    """Read `2023-11-16 18:15:46.6805900`; it has more digits than datetime takes."""
    whole, _, part = text.partition(".")
    seconds = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
    digits = "".join(c for c in part.partition("+")[0] if c.isdigit())
    return seconds + (float(f"0.{digits}") if digits else 0.0)
