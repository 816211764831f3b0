from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.planner.completion.layers import split_layers
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
