from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.pipeline import pipeline_time_s, steady_period_s
from megatron_hetero.cost.work.compute import PassTimes

SECONDS = st.floats(0.01, 3)


def test_one_stage_has_no_bubble() -> None:
    assert pipeline_time_s([PassTimes(1, 2)], [], [], 7) == 21


def test_period_is_the_slowest_stage_without_hops() -> None:
    assert steady_period_s([1, 3, 2], [0, 0]) == 3


def test_period_counts_the_round_trip_of_a_slow_hop() -> None:
    assert steady_period_s([1, 1, 1, 1], [0, 4, 0]) == 3
    assert steady_period_s([1], [], busiest_link_s=5) == 5


@given(st.data(), st.integers(1, 6), st.integers(1, 12))
def test_quick_time_is_near_and_a_period_apart(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    """With latency alone (no busy link) the steady state is exact: from some micro-batch on, each
    further one costs one period on average."""
    stages = [PassTimes(data.draw(SECONDS), data.draw(SECONDS)) for _ in range(num_stages)]
    hops = [BoundaryTime(0.0, data.draw(SECONDS)) for _ in range(num_stages - 1)]
    times = [s.total_s for s in stages]
    trips = [2 * h.total_s for h in hops]
    exact = pipeline_time_s(stages, hops, hops, num_micro_batches)
    assert exact >= max(times) * num_micro_batches - 1e-9
    # The longest path may pass each stage's own order once more than there are micro-batches.
    later = num_micro_batches + num_stages - 1
    quick_s = sum(times) + sum(trips) + (later - 1) * steady_period_s(times, trips)
    assert exact <= quick_s + 1e-9
    far = [pipeline_time_s(stages, hops, hops, m) for m in (300, 900)]
    assert (far[1] - far[0]) / 600 == pytest.approx(steady_period_s(times, trips), rel=0.01)
