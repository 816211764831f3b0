"""The text form of a stage's order of computations: `FFFBFBFBB`.

    order := (pass [CHUNK])*        white space is free
    pass  := 'F' forward | 'B' backward | 'I' backward for inputs | 'W' weight gradients

The n-th pass of a kind and chunk is micro-batch n; CHUNK, which counts the stage's model chunks, is
left out for chunk 0.  `I` and later `W` are the two parts of one backward pass (zero bubble).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from megatron_hetero.errors import PlanFormatError

Letter = Literal["F", "B", "I", "W"]
Pass = tuple[Letter, int]
"""(kind, chunk)."""

_TOKEN = re.compile(r"([FBIW])(\d{0,4})")


@lru_cache(maxsize=256)
def parse_order(text: str) -> tuple[Pass, ...]:
    """Read an order; replicas alike share theirs.

    Raises:
        PlanFormatError: names the character that is no pass, and its place in `text`, from 1.

    >>> parse_order("F F1 B1 B")
    (('F', 0), ('F', 1), ('B', 1), ('B', 0))
    """
    passes: list[Pass] = []
    # White space is left out; messages count with it.
    places = [place for place, character in enumerate(text) if not character.isspace()]
    compact = "".join(text[place] for place in places)
    position = 0
    while position < len(compact):
        token = _TOKEN.match(compact, position)
        if token is None:
            raise PlanFormatError(
                f"{compact[position]!r} at character {places[position] + 1}; expected is F, B, I "
                "or W, with the number of the model chunk behind it if it is not 0"
            )
        letter: Letter = token[1]  # type: ignore[assignment]
        # No digits mean chunk 0, as for all stages with one chunk.
        passes.append((letter, int(token[2] or 0)))
        position = token.end()
    return tuple(passes)


def format_order(passes: Iterable[Pass]) -> str:
    """Print an order; `parse_order` gives it back."""
    return "".join(f"{letter}{chunk or ''}" for letter, chunk in passes)
