"""Means over the requests of a class, whose lengths differ.

Attention grows with the square of a prompt, and long answers decode for longer: the mean of what
requests cost is more than the cost of a request of mean length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_hetero.serving.prices.work import pairs_of
from megatron_hetero.serving.workload.requests import RequestClass


@dataclass(frozen=True)
class MeanRequest:
    """Means of a class.

    Attributes:
        prefix: tokens that all prompts begin with, as far as they are so long.
        new: tokens of a prompt behind the prefix, at least one.
        pairs, near_pairs: of attention of these; and in layers with a window.
        context, near_context: tokens that a decoded token attends to, over all decoded tokens; and
            in layers with a window.
        held: tokens behind the prefix that a request holds: with its whole answer, or, where few
            answers are far longer than the mean, with the half of them that is there on average.
    """

    prefix: float
    new: float
    pairs: float
    near_pairs: float
    context: float
    near_context: float
    held: float


@lru_cache(maxsize=1024)
def mean_request(kind: RequestClass, window: int | None) -> MeanRequest:
    """Return the means of a class.

    Args:
        kind: the class.
        window: most tokens that a token attends to in layers with a window; None without such.
    """
    inputs, outputs = kind.input_tokens, kind.output_tokens
    prefix = inputs.mean * kind.shared_prefix

    def pairs(tokens: int, most: int | None) -> float:
        cached = min(prefix, tokens - 1)
        return pairs_of(cached, tokens - cached, most)

    def context(most: int | None) -> float:
        # An answer of twice as many tokens counts twice as often.
        return outputs.mean_of(
            lambda n: n * inputs.mean_of(lambda tokens: _mean_within(tokens, n, most))
        ) / outputs.mean  # fmt: skip

    new = inputs.mean_of(lambda tokens: tokens - min(prefix, tokens - 1))
    # Tokens of an answer that are there, at a moment at which some request decodes.
    there = outputs.mean_of(lambda n: n * n) / outputs.mean / 2
    return MeanRequest(
        prefix,
        new,
        inputs.mean_of(lambda tokens: pairs(tokens, None)),
        inputs.mean_of(lambda tokens: pairs(tokens, window)) if window else 0.0,
        context(None),
        context(window) if window else 0.0,
        new + max(outputs.mean, there),
    )


def _mean_within(first: int, further: int, most: int | None) -> float:
    """Return the mean context while it grows from `first` by `further` tokens, up to `most`."""
    last = first + further
    # From this context on it is the window.
    turn = last if most is None else min(max(first, most), last)
    grown = (turn * turn - first * first) / 2
    return (grown + min(most or last, last) * (last - turn)) / further
