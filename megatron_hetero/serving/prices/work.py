"""The work of one step of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StepWork(NamedTuple):
    """Work of a step.

    Attributes:
        tokens: that go through the layers.
        sampled: requests that get a token.
        pairs: of a prompt's token and an earlier one or itself.
        context: tokens whose keys and values decoding requests read, over all of them.
        near_pairs, near_context: the same in layers with a window; None: no layer has one.
    """

    tokens: float
    sampled: float
    pairs: float = 0.0
    context: float = 0.0
    near_pairs: float | None = None
    near_context: float | None = None

    @property
    def decoding(self) -> float:
        """Return the requests that decode: all that are sampled, as a prompt that ends in a step
        that also decodes counts little."""
        return self.sampled if self.context else 0.0

    def apart(self) -> tuple[StepWork, StepWork]:
        """Return the prompts of the step and its decodes as two steps."""
        decoding = min(self.decoding, self.tokens)
        prompts = StepWork(
            self.tokens - decoding, self.sampled - decoding, self.pairs, 0.0, self.near_pairs, 0.0
        )
        decodes = StepWork(decoding, decoding, 0.0, self.context, 0.0, self.near_context)
        return prompts, decodes

    def near(self) -> StepWork:
        """Return the work as layers with a window have it."""
        pairs = self.pairs if self.near_pairs is None else self.near_pairs
        context = self.context if self.near_context is None else self.near_context
        return self._replace(pairs=pairs, context=context)


def step_work(
    contexts: Sequence[int], chunks: Sequence[tuple[int, int]], ended: int, window: int | None
) -> StepWork:
    """Return the work of a step.

    Args:
        contexts: tokens that each request that decodes attends to.
        chunks: (tokens before, new tokens) of each prompt.
        ended: prompts that end, and so are sampled.
        window: most tokens that a token attends to in layers with a window; None: no layer has one.
    """
    work = StepWork(
        float(len(contexts) + sum(chunk for _, chunk in chunks)),
        float(len(contexts) + ended),
        float(sum(pairs_of(done, chunk) for done, chunk in chunks)),
        float(sum(contexts)),
    )
    if window is None:
        return work
    return work._replace(
        near_pairs=float(sum(pairs_of(done, chunk, window) for done, chunk in chunks)),
        near_context=float(sum(min(context, window) for context in contexts)),
    )


def pairs_of(done: float, chunk: float, window: int | None = None) -> float:
    """Return the pairs of attention of some new tokens, with those before and inside of them.

    Args:
        done: tokens before them.
        chunk: new tokens.
        window: most tokens that each attends to; None: all.
    """
    # The first of them see all tokens before, and the others a window.
    first = chunk if window is None else min(chunk, max(0.0, window - done))
    return first * done + first * (first + 1) / 2 + (chunk - first) * (window or 0)
