"""Referee C: HexGen-3's estimator, and our programme on its space."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from megatron_hetero.serving.compose.milp import serve_most
from tools.referees.hexgen3 import (
    CARDS,
    LLAMA_8B,
    QWEN3_30B,
    HexGen3,
    Lengths,
    Replica,
    mean_lengths,
)
from tools.referees.hexgen3_offers import composing, replica_of

README = mean_lengths([512] * 45 + [4096] * 19, [128] * 45 + [512] * 19)
"""Lengths of the command in its README: 30 % of 64 requests are long."""
WILDGPT = Lengths(95, 278)
"""Means of its trace, 512 samples."""


@pytest.mark.parametrize(
    ("referee", "capacity", "num_experts", "published", "optimum"),
    [
        (HexGen3(LLAMA_8B, README), {"H100": 4, "H20": 4}, 1, 23.68, 35.66),
        (HexGen3(QWEN3_30B, WILDGPT), {"H100": 8, "H20": 16}, 128, 1120.31, 1313.42),
    ],
)
def test_its_published_settings(
    referee: HexGen3, capacity: dict[str, int], num_experts: int, published: float, optimum: float
) -> None:
    found = serve_most(composing(referee, capacity, num_experts), gap=1e-7)
    counts = {replica_of(name): n for name, n in found.counts.items()}
    assert referee.score(counts) == pytest.approx(found.scale)
    assert referee.score(counts) == pytest.approx(optimum, abs=0.01)
    assert referee.score(counts) > published


def test_30_capacities_equal_trying_all_plans_of_its_space() -> None:
    rng = random.Random(3)
    for number in range(30):
        shape, experts = (QWEN3_30B, 128) if number % 2 else (LLAMA_8B, 1)
        referee = HexGen3(shape, Lengths(rng.randint(50, 3000), rng.randint(20, 900)))
        cards = rng.sample(sorted(CARDS), 2)
        capacity = {cards[0]: rng.randint(2, 4), cards[1]: rng.randint(1, 4)}
        found = serve_most(composing(referee, capacity, experts), gap=1e-9)
        assert found.scale == pytest.approx(_by_trying(referee, capacity, experts > 1)), number


def _by_trying(referee: HexGen3, capacity: dict[str, int], has_experts: bool) -> float:
    """Try every division of the cards among roles, and keep for each number of decode replicas the
    best attention and feed-forward."""

    @cache
    def best(role: str, card: str, num_cards: int) -> dict[int, float]:
        by_count: dict[int, float] = {0: 0.0} if num_cards == 0 else {}
        for widths in _partitions(num_cards, num_cards):
            for value in _throughputs(referee, role, card, widths, has_experts):
                by_count[len(widths)] = max(by_count.get(len(widths), 0.0), value)
        return by_count

    cards = sorted(capacity)
    answer = 0.0
    for split in product(*(_splits(capacity[card]) for card in cards)):
        prefill = sum(
            max(best("pre", card, part[0]).values())
            for card, part in zip(cards, split, strict=True)
        )
        decode = [
            _joined([best(role, card, part[k]) for card, part in zip(cards, split, strict=True)])
            for k, role in ((1, "attn"), (2, "ffn"))
        ]
        for count in set(decode[0]) & set(decode[1]):
            answer = max(answer, min(prefill, decode[0][count], decode[1][count]))
    return answer


def _throughputs(
    referee: HexGen3, role: str, card: str, widths: tuple[int, ...], has_experts: bool
) -> Iterator[float]:
    def one(width: int, degree: int) -> float:
        return referee.throughput(Replica(role, card, width, degree))

    if role != "ffn" or not has_experts:
        yield sum(one(width, 1) for width in widths)
        return
    within = [[d for d in (1, 2, 4, 8) if width % d == 0] for width in widths]
    yield sum(max(one(w, d) for d in degrees) for w, degrees in zip(widths, within, strict=True))
    if len(set(widths)) == 1:
        for degree in (2, 4, 8):
            if degree > widths[0] and degree % widths[0] == 0:
                yield len(widths) * one(widths[0], degree)


def _joined(parts: list[dict[int, float]]) -> dict[int, float]:
    joined = {0: 0.0}
    for part in parts:
        following: dict[int, float] = {}
        for (a, x), (b, y) in product(joined.items(), part.items()):
            following[a + b] = max(following.get(a + b, 0.0), x + y)
        joined = following
    return joined


def _splits(total: int) -> list[tuple[int, int, int]]:
    return [
        (a, b, c)
        for a in range(total + 1)
        for b in range(total + 1 - a)
        for c in range(total + 1 - a - b)
    ]


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, first):
            yield (first, *rest)
