from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.planner.division.layers import minimax, split_layers
from tests.planner.naive import parts


@settings(max_examples=200)
@given(st.data(), st.integers(1, 4), st.integers(1, 9))
def test_no_other_split_has_a_faster_slowest_stage(
    data: st.DataObject, num_stages: int, num_layers: int
) -> None:
    numbers = st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages)
    times, bases, caps = data.draw(numbers), data.draw(numbers), data.draw(numbers)

    def slowest(split: tuple[int, ...]) -> int:
        return max(b + n * t for b, n, t in zip(bases, split, times, strict=True))

    fitting = [
        split
        for split in parts(num_layers, num_stages)
        if all(n <= cap for n, cap in zip(split, caps, strict=True))
    ]
    found = split_layers(num_layers, times, bases, caps)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert slowest(found) == min(map(slowest, fitting))


def test_a_faster_stage_takes_more_layers() -> None:
    assert split_layers(12, [1, 2], [0, 0], [12, 12]) == (8, 4)
    assert split_layers(12, [1, 2], [0, 0], [6, 12]) == (6, 6)


@given(
    times_s=st.lists(st.lists(st.floats(0.1, 5), min_size=0, max_size=6), min_size=1, max_size=4),
    num_layers=st.integers(1, 9),
)
def test_minimax_is_the_best_of_all_splits(times_s: list[list[float]], num_layers: int) -> None:
    rising = [[sum(steps[: n + 1]) for n in range(len(steps))] for steps in times_s]
    splits = [
        split
        for split in parts(num_layers, len(rising))
        if all(n <= len(times) for n, times in zip(split, rising, strict=True))
    ]
    found = minimax(num_layers, rising)
    if not splits:
        assert found is None
        return

    def slowest_s(split: tuple[int, ...]) -> float:
        return max(times[n - 1] for n, times in zip(split, rising, strict=True))

    assert found in splits and found is not None
    assert slowest_s(found) == pytest.approx(min(map(slowest_s, splits)))


def test_of_equal_stages_the_later_one_takes_the_layer() -> None:
    """It keeps fewer micro-batches: three layers on two equal stages are 1 and 2."""
    assert minimax(3, [[1.0, 2.0, 3.0]] * 2) == (1, 2)
