from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.planner.division.micro_batches import share_micro_batches
from tests.planner.naive import parts


@settings(max_examples=200)
@given(st.data(), st.integers(1, 4), st.integers(1, 10))
def test_no_other_share_ends_earlier(
    data: st.DataObject, num_replicas: int, num_micro_batches: int
) -> None:
    numbers = st.lists(st.integers(1, 20), min_size=num_replicas, max_size=num_replicas)
    fills, periods = data.draw(numbers), data.draw(numbers)

    def end(shares: tuple[int, ...]) -> int:
        return max(f + (m - 1) * p for f, m, p in zip(fills, shares, periods, strict=True))

    found = share_micro_batches(num_micro_batches, fills, periods)
    if num_micro_batches < num_replicas:
        assert found is None
    else:
        assert found is not None and sum(found) == num_micro_batches
        assert end(found) == min(map(end, parts(num_micro_batches, num_replicas)))


def test_shares_follow_speed() -> None:
    assert share_micro_batches(16, [3, 1], [3, 1]) == (4, 12)
