"""One step of the engine as data, which the first rank tells all others: plain JSON, no pickle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

BLOCK_TOKENS = 16
"""Tokens of a block of keys and values."""
_PAIR_BYTES = 64
"""Of a token (up to 20 digits), its log-probability (up to 25 characters) and what divides them."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: `temperature` 0 takes the likeliest.

    Attributes:
        top_k: 0 for all.
        seed: of the request; with the token's number in it the draw is decided.
        num_logprobs: log-probabilities of so many likeliest tokens are returned; None for none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    num_logprobs: int | None = None


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a step.

    Attributes:
        sequence: its number.
        first: position of the first token.
        tokens: those to compute, whose keys and values are stored.
        blocks: of the sequence's keys and values, in order.
        draws: number of the token that is drawn after the last one; None: the prompt goes on.
        sampling: how, where a token is drawn.
    """

    sequence: int
    first: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    draws: int | None = None
    sampling: Sampling = Sampling()

    @property
    def stop(self) -> int:
        """Return the position after the last token."""
        return self.first + len(self.tokens)


@dataclass(frozen=True)
class Step:
    """Segments that go through the stages together.

    `num_tokens` is the length of the activations: a multiple of every stage's width, so that
    sequence parallelism divides it; what exceeds the segments computes nothing of use.
    """

    segments: tuple[Segment, ...]
    num_tokens: int

    @classmethod
    def of(cls, segments: tuple[Segment, ...], multiple: int) -> Step:
        """Return the step of some segments, filled up to a multiple of tokens."""
        count = sum(len(segment.tokens) for segment in segments)
        return cls(segments, multiple * ceil(count / multiple))

    @property
    def drawn(self) -> tuple[Segment, ...]:
        """Return the segments after which a token is drawn."""
        return tuple(segment for segment in self.segments if segment.draws is not None)

    @property
    def most_drawn_bytes(self) -> int:
        """Return a number of bytes that `drawn_to_bytes` does not exceed for this step's tokens."""
        likeliest = sum(s.sampling.num_logprobs or 0 for s in self.drawn)
        return 2 + (likeliest + len(self.drawn)) * _PAIR_BYTES

    def to_bytes(self) -> bytes:
        """Write the step."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Step:
        """Read what `to_bytes` has written."""
        told = json.loads(data)
        return cls(tuple(map(_segment, told["segments"])), told["num_tokens"])


def _segment(told: dict[str, Any]) -> Segment:
    return Segment(
        told["sequence"],
        told["first"],
        tuple(told["tokens"]),
        tuple(told["blocks"]),
        told["draws"],
        Sampling(**told["sampling"]),
    )


@dataclass(frozen=True)
class Drawn:
    """A drawn token, its log-probability, and those of the likeliest ones where they are asked
    for."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


def drawn_to_bytes(drawn: tuple[Drawn, ...]) -> bytes:
    """Write the tokens of a step, in the order of its segments that draw."""
    return json.dumps([[d.token, d.logprob, d.likeliest] for d in drawn]).encode()


def drawn_from_bytes(data: bytes) -> tuple[Drawn, ...]:
    """Read what `drawn_to_bytes` has written."""
    return tuple(
        Drawn(token, logprob, tuple((t, p) for t, p in likeliest))
        for token, logprob, likeliest in json.loads(data)
    )
