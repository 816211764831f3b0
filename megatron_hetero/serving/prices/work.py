"""The work of one step of an engine."""

from __future__ import annotations

from typing import NamedTuple


class StepWork(NamedTuple):
    """Work of a step.

    Attributes:
        tokens: that go through the layers.
        sampled: requests that get a token.
        pairs: of a prompt's token and an earlier one or itself.
        context: tokens whose keys and values decoding requests read, over all of them.
    """

    tokens: float
    sampled: float
    pairs: float = 0.0
    context: float = 0.0

    @property
    def decoding(self) -> float:
        """Return the requests that decode: all that are sampled, as a prompt that ends in a step
        that also decodes counts little."""
        return self.sampled if self.context else 0.0

    def apart(self) -> tuple[StepWork, StepWork]:
        """Return the prompts of the step and its decodes as two steps."""
        decoding = min(self.decoding, self.tokens)
        prompts = StepWork(self.tokens - decoding, self.sampled - decoding, self.pairs)
        return prompts, StepWork(decoding, decoding, 0.0, self.context)
