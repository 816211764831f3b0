"""The window of attention that a job's flags set, and the layers that have it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_hetero.errors import UsageError
from megatron_hetero.model.arguments import command_line_words, group_arguments
from megatron_hetero.model.kinds_of_layers import listed_layers


def attention_window(megatron_args: Sequence[str]) -> int | None:
    """Return the most keys that a query sees, itself included, by `--window-size`, in the layers
    that have a window; None if no window is set.

    Raises:
        UsageError: the window is not two numbers.
    """
    words = _words(megatron_args, "--window-size")
    if words is None:
        return None
    text = " ".join(words)
    # Two numbers, with or without parentheses around them.
    found = re.fullmatch(r"\(?(-?[0-9]+), ?(-?[0-9]+)\)?", text)
    if found is None:
        raise UsageError(
            f"--window-size {text}: a window is two numbers, as in --window-size 1023,0"
        )
    return int(found[1]) + 1 if int(found[1]) >= 0 else None


def windowed_layers(megatron_args: Sequence[str], num_layers: int) -> tuple[int, ...]:
    """Return 1 for each layer with the window of `--window-size`, 0 for each other, shape [layer];
    empty if no window is set.

    Raises:
        UsageError: `--window-attn-skip-freq` is neither a number nor a list of the layers.
    """
    if attention_window(megatron_args) is None:
        return ()
    words = _words(megatron_args, "--window-attn-skip-freq")
    if words is None:
        return (1,) * num_layers
    text = "".join(words).replace(" ", "").strip("\"'")
    # N: every N-th layer sees everything, counted from 1.
    if text.isascii() and text.isdecimal() and int(text):
        return tuple(int((i + 1) % int(text) != 0) for i in range(num_layers))
    pattern = listed_layers(text)
    if pattern is None or len(pattern) != num_layers:
        raise UsageError(
            f'--window-attn-skip-freq is "{" ".join(words)}"; it must be a number (6 leaves every '
            f"sixth layer without a window) or a list of the {num_layers} layers such as "
            '"([1]*5+[0]*1)*4", with 1 for each layer that has one'
        )
    return tuple(pattern)


def _words(megatron_args: Sequence[str], flag: str) -> tuple[str, ...] | None:
    """Return the values of a flag, whose last occurrence holds; None if it is not given."""
    given = {a.flag: a for a in group_arguments(command_line_words(megatron_args))}
    return (given[flag].words or ())[1:] if flag in given else None
