"""Shares of a batch and balanced layers, against all there are."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.planner.completion.filled import Filled, balanced, shares
from megatron_hetero.planner.division.layers import minimax

SECONDS = st.floats(0.1, 10)


@given(lines=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=3), more=st.integers(0, 9))
def test_the_last_replica_ends_as_early_as_can_be(
    lines: list[tuple[float, float]], more: int
) -> None:
    total = len(lines) + more
    filled = [Filled((1,), (), None, 1, period + way, period) for period, way in lines]
    shared = shares(total, filled)
    assert shared is not None
    counts, end_s = shared
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


def of_size(size: int) -> Filled:
    """A pipeline of one stage that takes a second for each micro-batch of so many sequences."""
    return Filled((1,), (), None, size, 1.0, 1.0)


def test_unlike_sizes_make_up_the_batch_or_there_is_no_share() -> None:
    four, two = of_size(4), of_size(2)
    assert shares(6, [four, two]) == ((1, 1), 1.0)
    shared = shares(16, [four, two])
    assert shared is not None
    assert 4 * shared[0][0] + 2 * shared[0][1] == 16 and min(shared[0]) >= 1
    assert shared[1] == max(shared[0])
    assert shares(15, [four, two]) is None  # no even sizes make 15
    assert shares(4, [four, two]) is None  # not even one each


def test_equal_sizes_make_up_the_batch_or_there_is_no_share() -> None:
    three = of_size(3)
    assert shares(15, [three, three]) in (((3, 2), 3.0), ((2, 3), 3.0))
    assert shares(16, [three]) is None  # one sequence would be left over
    assert shares(16, [three, three]) is None
    assert shares(3, [three, three]) is None  # not even one each


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda own: len(set(own)) > 1),
    total=st.integers(1, 16),
)
def test_shares_of_unlike_sizes_add_up_whenever_they_are_given(
    sizes: list[int], total: int
) -> None:
    shared = shares(total, [of_size(size) for size in sizes])
    possible = any(
        sum(n * size for n, size in zip(split, sizes, strict=True)) == total
        for split in product(range(1, total + 1), repeat=len(sizes))
    )
    if shared is not None:
        assert sum(n * size for n, size in zip(shared[0], sizes, strict=True)) == total
        assert min(shared[0]) >= 1
    if not possible:
        assert shared is None
    elif 1 in sizes:  # whatever is left goes by ones
        assert shared is not None
