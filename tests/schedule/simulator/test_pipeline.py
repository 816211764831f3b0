from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.pipeline import least_pipeline_time_s, pipeline_time_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts, one_f_one_b
from megatron_hetero.schedule.programme import Schedule
from megatron_hetero.schedule.simulator.pipeline import simulate

NO_HOP = BoundaryTime(0.0, 0.0)
SECONDS = st.floats(0, 3)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 5), (4, 4), (4, 16), (6, 3)])
def test_equal_stages_take_the_closed_form(num_stages: int, num_micro_batches: int) -> None:
    hops = [NO_HOP] * (num_stages - 1)
    result = simulate(
        one_f_one_b(num_stages, num_micro_batches), [PassTimes(1, 2)] * num_stages, hops, hops
    )
    assert result.makespan_s == (num_micro_batches + num_stages - 1) * 3
    assert result.busy_s == (num_micro_batches * 3,) * num_stages
    bubble = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    assert result.bubble == pytest.approx(bubble)
    depths = tuple(min(num_stages - i, num_micro_batches) for i in range(num_stages))
    assert result.peak_in_flight == depths


@pytest.mark.parametrize(
    ("latency_s", "stock_s", "rule_s"),
    [
        (0.1, 73.4, 67.2),
        (0.25, 83, 67.5),
        (0.5, 99, 68),
        (1, 131, 69),
        (1.5, 163, 70),
        (2, 195, 71),
        (4, 323, 75),
        (8, 579, 83),
    ],
)
def test_slow_hop_in_the_middle(latency_s: float, stock_s: float, rule_s: float) -> None:
    """Four equal stages, 64 micro-batches, T = 1: the published rows for 1F1B and for the rule."""
    stages = [PassTimes(0.5, 0.5)] * 4
    hops = [NO_HOP, BoundaryTime(0.0, latency_s), NO_HOP]
    counts = launch_counts([1.0] * 4, [0, latency_s, 0])
    assert simulate(one_f_one_b(4, 64), stages, hops, hops).makespan_s == pytest.approx(stock_s)
    assert pipeline_time_s(stages, hops, hops, 64) == pytest.approx(stock_s)
    assert pipeline_time_s(stages, hops, hops, 64, counts) == pytest.approx(rule_s)
    deeper = simulate(one_f_one_b(4, 64, counts), stages, hops, hops)
    assert deeper.makespan_s == pytest.approx(rule_s)
    assert deeper.peak_in_flight == counts


@settings(max_examples=200)
@given(st.data(), st.integers(1, 7), st.integers(1, 12) | st.sampled_from([40, 150]))
def test_the_planners_recurrence_is_the_simulation(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    def draw_hops() -> list[BoundaryTime]:
        return [BoundaryTime(data.draw(SECONDS), data.draw(SECONDS)) for _ in range(num_stages - 1)]

    stages = [PassTimes(data.draw(SECONDS), data.draw(SECONDS)) for _ in range(num_stages)]
    forward, backward = draw_hops(), draw_hops()
    result = simulate(one_f_one_b(num_stages, num_micro_batches), stages, forward, backward)
    own_s = pipeline_time_s(stages, forward, backward, num_micro_batches)
    assert result.makespan_s == pytest.approx(own_s)
    sizes = st.integers(1, num_micro_batches)
    counts = sorted((data.draw(sizes) for _ in range(num_stages)), reverse=True)
    schedule = one_f_one_b(num_stages, num_micro_batches, counts)
    result = simulate(schedule, stages, forward, backward)
    counted_s = pipeline_time_s(stages, forward, backward, num_micro_batches, counts)
    assert result.makespan_s == pytest.approx(counted_s)
    assert result.peak_in_flight == tuple(counts)
    least_s = least_pipeline_time_s(stages, forward, backward, num_micro_batches)
    assert least_s <= min(own_s, counted_s) * (1 + 1e-9)


def test_a_schedule_that_waits_for_ever_is_refused() -> None:
    schedule = one_f_one_b(2, 1)
    silent = Schedule(((), schedule.programmes[1]), 1)
    with pytest.raises(CheckFailedError, match=r"stage 1 waits for ever at recv_forward\(0\)"):
        simulate(silent, [PassTimes(1, 1)] * 2, [NO_HOP], [NO_HOP])
