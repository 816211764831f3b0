"""Whole replicas packed into the GPUs that there are, beside all packings."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds import packing as module
from megatron_hetero.bounds.packing import ReplicaTimes, least_packed_s

SHAPE = (3, 2)
"""Up to two GPUs of one class, and one of another."""


@st.composite
def replica_times(draw: st.DrawFn) -> ReplicaTimes:
    """Times that fall with GPUs and rise with sequences; none without GPUs."""
    counts = sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3)))
    speeds = [draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for _ in SHAPE]
    least = np.full((len(counts), *SHAPE), inf)
    for i, at in product(range(len(counts)), product(*map(range, SHAPE))):
        speed = sum(n * s for n, s in zip(at, speeds, strict=True))
        if speed:
            least[i, *at] = 0.2 + counts[i] / speed
    return ReplicaTimes(np.array([(n, n) for n in counts]), 1, least)


def most_packed(times: ReplicaTimes, fewest: int, most: int, step_s: float) -> float:
    """The most sequences of any packing of so many replicas into all GPUs."""
    places = [at for at in product(*map(range, SHAPE)) if any(at)]
    value = times.most(step_s)
    best = -inf

    def extend(left: tuple[int, ...], count: int, done: float) -> None:
        nonlocal best
        if count >= fewest:
            best = max(best, done)
        if count == most:
            return
        for at in places:
            rest = tuple(have - n for have, n in zip(left, at, strict=True))
            if min(rest) >= 0 and value[at] > 0:
                extend(rest, count + 1, done + float(value[at]))

    extend(tuple(n - 1 for n in SHAPE), 0, 0.0)
    return best


@settings(max_examples=15)
@given(
    replica_times(), st.integers(1, 3), st.integers(0, 2), st.integers(1, 12),
    st.sampled_from([0.5, 1.0, 2.0, 5.0]),
)  # fmt: skip
def test_a_step_is_possible_exactly_where_a_packing_does_all(
    times: ReplicaTimes, fewest: int, more: int, num_sequences: int, step_s: float
) -> None:
    """Up to a power of two of further replicas is allowed: never less than there is."""
    found = module._is_possible([times], num_sequences, (fewest, fewest + more), step_s)
    if most_packed(times, fewest, fewest + more, step_s) >= num_sequences:
        assert found
    if most_packed(times, fewest, 2 * (fewest + more), step_s) < num_sequences:
        assert not found
    if not more:
        assert found == (most_packed(times, fewest, fewest, step_s) >= num_sequences)


@settings(max_examples=10)
@given(replica_times(), st.integers(1, 2), st.integers(1, 8))
def test_no_packing_beats_the_step(times: ReplicaTimes, num: int, num_sequences: int) -> None:
    found_s = least_packed_s([times], num_sequences, (num, num), 0.1, 20.0)
    assert 0.1 <= found_s <= 20.0
    if found_s > 0.1:  # just below it nothing is done in time
        assert most_packed(times, num, num, found_s * 0.999) < num_sequences
    if found_s < 20.0:  # and a little above it something is
        assert most_packed(times, num, num, found_s * 1.003) >= num_sequences


def test_sequences_in_a_step_by_hand() -> None:
    """Four to six sequences take 6 s: in 5 s five, in 4 s four, and below that none."""
    times = ReplicaTimes(np.array([(4, 6)]), 1, np.array([[inf, 6.0]]))
    assert times.most(6.0).tolist() == [0.0, 6.0]
    assert times.most(60.0).tolist() == [0.0, 6.0]
    assert times.most(5.0).tolist() == [0.0, 5.0]
    assert times.most(4.0).tolist() == [0.0, 4.0]
    assert times.most(3.9).tolist() == [0.0, 0.0]


def test_sequences_come_in_whole_micro_batches() -> None:
    times = ReplicaTimes(np.array([(4, 8)]), 4, np.array([[inf, 8.0]]))
    assert times.most(8.0)[1] == 8.0
    assert times.most(7.9)[1] == 4.0


def test_what_is_impossible_is_as_long_as_asked() -> None:
    times = ReplicaTimes(np.array([(1, 1)]), 1, np.array([inf, 5.0, 5.0]).reshape(1, 3))
    assert least_packed_s([times], 3, (1, 1), 1.0, 50.0) == 50.0  # one replica does one
    assert least_packed_s([times], 2, (2, 2), 1.0, 50.0) == pytest.approx(5.0, rel=2e-3)
    assert least_packed_s([times], 1, (3, 3), 1.0, 50.0) == 50.0  # two GPUs, three replicas


def test_of_several_sizes_the_best_is_taken() -> None:
    slow, fast = (ReplicaTimes(np.array([(2, 2)]), 1, np.array([[inf, s]])) for s in (8.0, 3.0))
    assert least_packed_s([slow, fast], 2, (1, 1), 1.0, 50.0) == pytest.approx(3.0, rel=2e-3)
    assert least_packed_s([slow], 2, (1, 1), 1.0, 50.0) == pytest.approx(8.0, rel=2e-3)


def test_no_replicas_at_least_are_refused() -> None:
    times = ReplicaTimes(np.array([(1, 1)]), 1, np.array([[inf, 1.0]]))
    with pytest.raises(ValueError, match="no replicas"):
        least_packed_s([times], 1, (0, 2), 1.0, 50.0)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=9).map(lambda s: np.cumsum([0, *s])),
    st.integers(1, 3),
)
def test_many_prices_are_bounded_from_above(values: np.ndarray, num_replicas: int) -> None:
    value = values.astype(float)
    total = len(value) - 1
    best = max(
        sum(value[p] for p in prices)
        for prices in product(range(total + 1), repeat=num_replicas)
        if sum(prices) <= total
    )
    assert module._most_of_many(value, num_replicas) >= best - 1e-9
    assert module._most_of_many(value, 1) == pytest.approx(value[-1])
