"""What came of requests: times to first token and between tokens, deadlines kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.serving.simulate.queue import Running
from megatron_hetero.serving.workload.requests import RequestClass, RequestMix


@dataclass(frozen=True)
class Quantiles:
    """Of some seconds: mean, median, and the 90th and 99th of a hundred."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ClassOutcome:
    """Requests of a class, or of all: seconds to the first token, between later ones, in all; the
    part that kept its deadlines."""

    name: str
    num_requests: int
    first_token_s: Quantiles
    between_tokens_s: Quantiles
    total_s: Quantiles
    attainment: float


@dataclass(frozen=True)
class FleetOutcome:
    """A simulated run.

    Attributes:
        seconds: from the first arrival to the last token.
        tokens_per_s: given out, over these seconds.
        kept_up: first tokens for each request that came, in the second half of the arrivals.
        busy: part of the time in which each replica worked.
    """

    classes: tuple[ClassOutcome, ...]
    overall: ClassOutcome
    seconds: float
    tokens_per_s: float
    busy: tuple[float, ...]
    num_preemptions: int
    kept_up: float = 1.0

    def holds(self, attainment: float) -> bool:
        """Tell if every class keeps the deadlines for the given fraction of requests."""
        return all(c.attainment >= attainment for c in self.classes if c.num_requests)


def outcome_of(
    finished: Sequence[Running], mix: RequestMix, seconds: float, busy: Sequence[float], lost: int
) -> FleetOutcome:
    """Sum a run up.

    Args:
        finished: all requests, each with the moments of its tokens.
        mix: classes and deadlines.
        seconds: that the run took.
        busy: seconds in which each replica worked.
        lost: times that a request gave its place up.
    """
    by_class: list[list[Running]] = [[] for _ in mix.classes]
    for running in finished:
        by_class[running.request.class_index].append(running)
    parts = tuple(
        _of_class(kind, [(r, kind) for r in members])
        for kind, members in zip(mix.classes, by_class, strict=True)
    )
    # Among all classes together, each request has the deadlines of its own class.
    pairs = [(r, mix.classes[r.request.class_index]) for r in finished]
    tokens = sum(r.said for r in finished)
    return FleetOutcome(
        parts,
        _of_class(None, pairs),
        seconds,
        tokens / seconds if seconds else 0.0,
        tuple(b / seconds if seconds else 0.0 for b in busy),
        lost,
        _kept_up(finished),
    )


def _kept_up(finished: Sequence[Running]) -> float:
    moments = [r.request.arrival_s for r in finished]
    if not moments:
        return 1.0
    last = max(moments)
    half = (min(moments) + last) / 2
    came = sum(moment >= half for moment in moments)
    return sum(half <= r.first_s <= last for r in finished) / came


def _of_class(
    kind: RequestClass | None, members: Sequence[tuple[Running, RequestClass]]
) -> ClassOutcome:  # fmt: skip
    first = [r.first_s - r.request.arrival_s for r, _ in members]
    between = [_between_s(r) for r, _ in members]
    # Both deadlines of the request's own class.
    kept = sum(
        f <= own.first_token_s and b <= own.between_tokens_s
        for f, b, (_, own) in zip(first, between, members, strict=True)
    )
    total = [r.last_s - r.request.arrival_s for r, _ in members]
    return ClassOutcome(
        kind.name if kind else "all",
        len(members),
        quantiles(first),
        quantiles(between),
        quantiles(total),
        kept / len(members) if members else 1.0,
    )


def _between_s(running: Running) -> float:
    # The mean over the answer, as deadlines are of the mean.
    return (running.last_s - running.first_s) / (running.said - 1) if running.said > 1 else 0.0


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Return mean and quantiles (nearest rank); zeros of nothing."""
    if not seconds:
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(seconds)

    def at(part: float) -> float:
        # Nearest rank: the smallest value that so large a part does not exceed.
        return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)]

    return Quantiles(sum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99))
