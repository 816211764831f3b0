"""Shares of a batch and balanced layers, against all there are."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.planner.completion.filled import Filled, balanced, shares
from megatron_hetero.planner.refit.refit import minimax

SECONDS = st.floats(0.1, 10)


@given(lines=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=3), more=st.integers(0, 9))
def test_the_last_replica_ends_as_early_as_can_be(
    lines: list[tuple[float, float]], more: int
) -> None:
    total = len(lines) + more
    filled = [Filled((1,), (), None, 1, period + way, period) for period, way in lines]
    counts, end_s = shares(total, filled)
    assert sum(counts) == total
    assert min(counts) >= 1

    def ends(split: tuple[int, ...]) -> float:
        return max(f.fill_s + (n - 1) * f.period_s for f, n in zip(filled, split, strict=True))

    splits = product(range(1, total + 1), repeat=len(lines))
    assert abs(end_s - min(ends(s) for s in splits if sum(s) == total)) <= 1e-9 * end_s
    assert abs(end_s - ends(counts)) <= 1e-9 * end_s


@given(
    layer_s=st.lists(SECONDS, min_size=1, max_size=4),
    most=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    trip_s=SECONDS,
    num_layers=st.integers(1, 12),
)
def test_balanced_layers_fit_and_are_no_worse_than_the_minimax_split(
    layer_s: list[float], most: list[int], trip_s: float, num_layers: int
) -> None:
    times_s = [[s * n for n in range(1, m + 1)] for s, m in zip(layer_s, most, strict=False)]
    trips_s, number = [trip_s] * (len(layer_s) - 1), 8

    def least_s(layers: tuple[int, ...]) -> float:
        way_s = found_s = 0.0
        for n, times, trip in zip(layers, times_s, [*trips_s, 0.0], strict=True):
            found_s = max(found_s, way_s + number * times[n - 1])
            way_s += times[n - 1] + trip
        return found_s

    layers, plain = balanced(num_layers, times_s, trips_s, number), minimax(num_layers, times_s)
    assert (layers is None) == (plain is None)
    if layers is not None and plain is not None:
        assert sum(layers) == num_layers
        assert all(1 <= n <= len(times) for n, times in zip(layers, times_s, strict=True))
        assert least_s(layers) <= least_s(plain) * (1 + 1e-9)
