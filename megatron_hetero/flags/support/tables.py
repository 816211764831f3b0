"""Tables of the treatment of Megatron's flags, read from the JSON files beside this one.

`support.json` has the treatment on an asymmetric plan, `verification.json` the one in `verify`. An
entry has the fields of its class (`kinds`); fields that are left out have the class's default. In a
note `{megatron}` stands for the release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

from megatron_hetero.errors import FileFormatError
from megatron_hetero.flags.support.kinds import Entry, Neutral, Status, Support, Treatment
from megatron_hetero.model.megatron_release import MEGATRON

FOLDER = Path(__file__).parent
_WORDS = {"status": Status, "treatment": Treatment, "neutral": Neutral}
_LISTS = ("names", "followed", "values")


@cache
def support_table() -> tuple[Support, ...]:
    """Return the treatment of every flag on an asymmetric plan; the first entry decides."""
    return read_table(FOLDER / "support.json", Support)


@cache
def verification_table() -> tuple[Entry, ...]:
    """Return the treatment of flags in `verify`; the first entry decides."""
    return read_table(FOLDER / "verification.json", Entry)


def read_table[E: (Support, Entry)](path: Path, kind: type[E]) -> tuple[E, ...]:
    """Return the entries of a file.

    Raises:
        FileFormatError: the file is no list of entries; the message names file, entry and key.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileFormatError(f"{path}: no JSON: {error}") from error
    if not isinstance(rows, list):
        raise FileFormatError(f"{path}: a list of entries is expected, not {type(rows).__name__}")
    return tuple(_entry(kind, row, f"{path}: entry {number}") for number, row in enumerate(rows, 1))


def _entry[E: (Support, Entry)](kind: type[E], row: Any, place: str) -> E:
    if not isinstance(row, Mapping) or not row.get("names"):
        raise FileFormatError(f"{place}: an entry is an object with the key 'names'")
    place = f"{place} ({row['names'][0]} ...)"
    allowed = [field.name for field in fields(kind)]
    for key, value in row.items():
        if key not in allowed:
            raise FileFormatError(f"{place}: unknown key {key!r}; allowed are {', '.join(allowed)}")
        if key in _WORDS and value not in (words := get_args(_WORDS[key])):
            raise FileFormatError(f"{place}: {key} is {value!r}; allowed are {', '.join(words)}")
        # A text in the place of a list would be read as one flag for each letter.
        if (key in _LISTS) != isinstance(value, list):
            form = "a list of texts" if key in _LISTS else "no list"
            raise FileFormatError(f"{place}: {key} has to be {form}, not {value!r}")
    if allowed[0] not in row:
        raise FileFormatError(f"{place}: {allowed[0]} is missing")
    values: dict[str, Any] = {k: tuple(v) if k in _LISTS else v for k, v in row.items()}
    values["note"] = row.get("note", "").replace("{megatron}", MEGATRON)
    return kind(**values)
