"""The window of attention that a job's flags set."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_hetero.errors import UsageError
from megatron_hetero.model.arguments import command_line_words, group_arguments


def attention_window(megatron_args: Sequence[str]) -> int | None:
    """Return the most keys that a query sees, itself included, by `--window-size`, in the layers
    that have a window; None if no window is set.

    Raises:
        UsageError: the window is not two numbers.
    """
    # The last occurrence of a flag holds.
    given = {a.flag: a for a in group_arguments(command_line_words(megatron_args))}
    if "--window-size" not in given:
        return None
    text = " ".join(given["--window-size"].words or ())
    # Two numbers, with or without parentheses around them.
    found = re.fullmatch(r"--window-size \(?(-?[0-9]+), ?(-?[0-9]+)\)?", text)
    if found is None:
        raise UsageError(f"{text}: a window is two numbers, as in --window-size 1023,0")
    return int(found[1]) + 1 if int(found[1]) >= 0 else None
