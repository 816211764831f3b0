"""Classes of requests, and single requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile


@dataclass(frozen=True)
class TokenLengths:
    """A distribution of a number of tokens: (tokens, weight), weights above 0."""

    values: tuple[tuple[int, float], ...]

    @cached_property
    def mean(self) -> float:
        """Return the mean tokens."""
        total = sum(weight for _, weight in self.values)
        return sum(tokens * weight for tokens, weight in self.values) / total

    def mean_of(self, figure: Callable[[int], float]) -> float:
        """Return the mean of a figure of the tokens."""
        total = sum(weight for _, weight in self.values)
        return sum(figure(tokens) * weight for tokens, weight in self.values) / total

    @cached_property
    def most(self) -> int:
        """Return the largest number of tokens."""
        return max(tokens for tokens, _ in self.values)

    def draw(self, rng: random.Random) -> int:
        """Return one number of tokens."""
        if len(self.values) == 1:
            return self.values[0][0]
        tokens, weights = zip(*self.values, strict=True)
        return int(rng.choices(tokens, weights)[0])


@dataclass(frozen=True)
class RequestClass:
    """Requests that are alike.

    Attributes:
        rate_per_s: mean arrivals.
        input_tokens, output_tokens: of a request.
        first_token_s: deadline from arrival to the first token; infinite for none.
        between_tokens_s: deadline of the mean time between later tokens; infinite for none.
        shared_prefix: part of the input that all requests of the class begin with.
    """

    name: str
    rate_per_s: float
    input_tokens: TokenLengths
    output_tokens: TokenLengths
    first_token_s: float = math.inf
    between_tokens_s: float = math.inf
    shared_prefix: float = 0.0

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the longest request, whose keys and values have to fit."""
        return self.input_tokens.most + self.output_tokens.most


@dataclass(frozen=True)
class Request:
    """One request: when it comes, which class, how long."""

    arrival_s: float
    class_index: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class RequestMix:
    """All classes of a workload, and the trace from which the classes were read, if there is a
    trace.

    Attributes:
        attainment: part of the requests whose deadlines have to hold.
    """

    classes: tuple[RequestClass, ...]
    trace: tuple[Request, ...] = ()
    attainment: float = 0.9
    source: str = ""

    @property
    def demand(self) -> tuple[float, ...]:
        """Return the arrivals per second of each class."""
        return tuple(c.rate_per_s for c in self.classes)

    def arrivals(self, duration_s: float, seed: int, scale: float = 1.0) -> list[Request]:
        """Return the requests of some seconds, in the order of their arrival: those of the trace,
        which begins again where it ends, or of a Poisson process for each class.

        Args:
            duration_s: seconds of arrivals.
            seed: of the drawing; equal seeds give equal requests.
            scale: of the rates; a trace is sped up.
        """
        if self.trace:
            return list(takewhile(lambda r: r.arrival_s < duration_s, self._rounds(scale)))
        found: list[Request] = []
        for index, kind in enumerate(self.classes):
            if kind.rate_per_s <= 0:
                continue
            # A generator for each class: one more class changes nothing of the others.
            rng = random.Random(f"{seed}/{index}")
            now = rng.expovariate(scale * kind.rate_per_s)
            while now < duration_s:
                tokens = kind.input_tokens.draw(rng), kind.output_tokens.draw(rng)
                found.append(Request(now, index, *tokens))
                now += rng.expovariate(scale * kind.rate_per_s)
        return sorted(found, key=lambda r: (r.arrival_s, r.class_index))

    def _rounds(self, scale: float) -> Iterator[Request]:
        """Yield the requests of the trace, again and again."""
        # A mean gap lies behind the last request, too, as in the rates of its classes.
        span_s = len(self.trace) / sum(self.demand)
        for number in count():
            for r in self.trace:
                # At twice the rates a trace takes half the time.
                at = (number * span_s + r.arrival_s) / scale
                yield Request(at, r.class_index, r.input_tokens, r.output_tokens)


def quantised(tokens: Sequence[int], most_values: int = 16) -> TokenLengths:
    """Return the distribution of observed lengths with at most so many values, each the mean of
    equally many neighbours."""
    ordered = sorted(tokens)
    # Neighbours in length, in groups of equal size.
    size = math.ceil(len(ordered) / most_values)
    parts = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    counted: dict[int, float] = {}
    for part in parts:
        # Groups may have the same mean.
        middle = max(1, round(sum(part) / len(part)))
        counted[middle] = counted.get(middle, 0.0) + len(part)
    # The longest has to fit, not the mean of the long ones.
    last = max(counted)
    if ordered[-1] > last:
        # One request of the longest group is moved to the longest length itself.
        counted[last] -= 1
        counted[ordered[-1]] = counted.get(ordered[-1], 0.0) + 1
    return TokenLengths(tuple((t, w) for t, w in sorted(counted.items()) if w > 0))
