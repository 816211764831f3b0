"""Paths: equal to all permutations up to 8 places."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.planner.columns.shortest_paths import shortest_paths


@st.composite
def distances(draw: st.DrawFn, max_places: int) -> list[list[float]]:
    num_places = draw(st.integers(1, max_places))
    seconds = [[0.0] * num_places for _ in range(num_places)]
    for i in range(num_places):
        for j in range(i):
            seconds[i][j] = seconds[j][i] = draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0]))
    return seconds


def length(seconds: list[list[float]], path: tuple[int, ...]) -> float:
    return sum(seconds[a][b] for a, b in pairwise(path))


@settings(max_examples=60, deadline=None)
@given(distances(7))
def test_up_to_seven_places_no_order_is_shorter(seconds: list[list[float]]) -> None:
    shortest = min(length(seconds, path) for path in permutations(range(len(seconds))))
    for path in shortest_paths(seconds):
        assert sorted(path) == list(range(len(seconds)))
        assert length(seconds, path) == pytest.approx(shortest)


def test_eight_places_too() -> None:
    seconds = [[abs(i * i - j * j) % 7 + 0.1 * (i != j) for j in range(8)] for i in range(8)]
    shortest = min(length(seconds, path) for path in permutations(range(8)))
    assert length(seconds, shortest_paths(seconds)[0]) == pytest.approx(shortest)


@settings(max_examples=20, deadline=None)
@given(distances(14))
def test_many_places_are_all_visited(seconds: list[list[float]]) -> None:
    for path in shortest_paths(seconds):
        assert sorted(path) == list(range(len(seconds)))
