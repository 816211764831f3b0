"""Computed schedules: they run, keep to their limits, and take on the clock what the simulator
says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.pipeline import pipeline_time_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.orders.list_schedule import Policy, TimedPipeline, list_schedule
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts, one_f_one_b
from megatron_hetero.schedule.orders.synthesise import synthesise
from megatron_hetero.schedule.orders.zero_bubble import zero_bubble
from megatron_hetero.schedule.parts import ChunkTimes
from megatron_hetero.schedule.simulator.pipeline import simulate

SECONDS = st.floats(0.0, 3.0)


def pipeline(
    stage_times_s: list[float], hop_times_s: list[float], num_micro_batches: int
) -> TimedPipeline:
    """Forward, backward for inputs and for weights take a third each; hops are latency."""
    hops = tuple(BoundaryTime(0.0, hop_s) for hop_s in hop_times_s)
    times = tuple((ChunkTimes(t / 3, t / 3, t / 3),) for t in stage_times_s)
    return TimedPipeline(tuple(range(len(times))), num_micro_batches, times, hops, hops)


@st.composite
def pipelines(draw: st.DrawFn) -> TimedPipeline:
    """Random chains, times and hops."""
    num_stages = draw(st.integers(1, 4))
    chain = list(range(num_stages))
    if num_stages > 1:
        for _ in range(draw(st.integers(0, 2))):
            some = sorted(draw(st.sets(st.integers(0, num_stages - 1))))
            chain += some[1:] if some and some[0] == chain[-1] else some
        if chain[-1] != num_stages - 1:
            chain.append(num_stages - 1)
    times = tuple(
        tuple(ChunkTimes(draw(SECONDS), draw(SECONDS), draw(SECONDS)) for s in chain if s == stage)
        for stage in range(num_stages)
    )
    hops = [tuple(BoundaryTime(draw(SECONDS), draw(SECONDS)) for _ in chain[1:]) for _ in range(2)]
    return TimedPipeline(tuple(chain), draw(st.integers(1, 6)), times, *hops)


policies = st.builds(
    Policy,
    split=st.booleans(),
    alternate=st.booleans(),
    patience=st.sampled_from([0.0, 0.5, 1.0]),
    group_size=st.integers(0, 3),
)


@settings(max_examples=150)
@given(pipelines(), policies)
def test_a_list_takes_what_the_simulator_says(asked: TimedPipeline, policy: Policy) -> None:
    limits = [len(chunks) * asked.num_micro_batches for chunks in asked.times]
    listed = list_schedule(asked, limits, policy)
    check_schedule(listed.schedule)
    simulated = simulate(listed.schedule, asked.times, asked.forward_hops, asked.backward_hops)
    assert simulated.makespan_s == pytest.approx(listed.makespan_s)


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 3), min_size=2, max_size=4), st.data(), st.integers(1, 12), policies)
def test_limits_are_kept(
    times: list[float], data: st.DataObject, num_micro_batches: int, policy: Policy
) -> None:
    """One micro-batch at a time on every stage can always run, so any limits can."""
    asked = pipeline(times, [data.draw(SECONDS) for _ in times[1:]], num_micro_batches)
    limits = [data.draw(st.integers(1, 6)) for _ in times]
    listed = list_schedule(asked, limits, policy)
    simulated = simulate(listed.schedule, asked.times, asked.forward_hops, asked.backward_hops)
    assert all(n <= limit for n, limit in zip(simulated.peak_in_flight, limits, strict=True))


def test_limits_that_no_schedule_keeps_are_refused() -> None:
    """Stage 0 has two chunks, and may not begin the second pass while the first is under way."""
    unit = ChunkTimes(1.0, 1.0, 1.0)
    hops = (BoundaryTime(0.0, 0.0),) * 3
    asked = TimedPipeline((0, 1, 0, 1), 2, ((unit, unit), (unit, unit)), hops, hops)
    with pytest.raises(CheckFailedError, match=r"at most \[1, 1\] passes"):
        list_schedule(asked, [1, 1], Policy())
    with pytest.raises(CheckFailedError, match="no schedule keeps"):
        synthesise(asked, [1, 1])


def test_zero_bubble_of_equal_stages() -> None:
    """The bubble is (P - 1)(F + B - 2W), with F = W = 1 and B = 2; 1F1B's is three times that."""
    for num_stages, m in ((2, 8), (4, 16)):
        asked = pipeline([3.0] * num_stages, [0.0] * (num_stages - 1), m)
        bubble_s = zero_bubble(asked).makespan_s - 3 * m
        assert bubble_s == pytest.approx((num_stages - 1) * (1 + 2 - 2))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.1, 3), min_size=1, max_size=4),
    st.data(),
    st.integers(1, 12),
    st.booleans(),
)
def test_never_worse_than_1f1b_with_the_rules_counts(
    times: list[float], data: st.DataObject, num_micro_batches: int, split: bool
) -> None:
    asked = pipeline(times, [data.draw(SECONDS) for _ in times[1:]], num_micro_batches)
    hops_s = [hop.total_s for hop in asked.forward_hops]
    counts = [min(n, num_micro_batches) for n in launch_counts(times, hops_s)]
    rule = one_f_one_b(len(times), num_micro_batches, counts)
    hops = asked.forward_hops, asked.backward_hops
    found = synthesise(asked, split=split)
    check_schedule(found.schedule)
    simulated_s = simulate(found.schedule, asked.times, *hops).makespan_s
    assert simulated_s <= simulate(rule, asked.times, *hops).makespan_s * (1 + 1e-9)
    within = synthesise(asked, counts, split=split)
    simulated = simulate(within.schedule, asked.times, *hops)
    assert all(n <= c for n, c in zip(simulated.peak_in_flight, counts, strict=True))
    assert simulated.makespan_s <= simulate(rule, asked.times, *hops).makespan_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("hop_s", "rule_s", "zero_s", "doubled_s"), [(0.5, 34.8, 34.0, 32.4), (2.0, 37.8, 37.2, 33.2)]
)
def test_published_gains_of_split_passes(
    hop_s: float, rule_s: float, zero_s: float, doubled_s: float
) -> None:
    """Stages of 1, 1, 0.7, 0.7 and a slow hop in the middle, 32 micro-batches."""
    times = [1.0, 1.0, 0.7, 0.7]
    asked = pipeline(times, [0.0, hop_s, 0.0], 32)
    counts = launch_counts(times, [0.0, hop_s, 0.0])
    passes = [PassTimes(t / 3, 2 * t / 3) for t in times]
    own_s = pipeline_time_s(passes, asked.forward_hops, asked.backward_hops, 32, counts)
    assert own_s == pytest.approx(rule_s)
    assert zero_bubble(asked, counts).makespan_s <= zero_s + 1e-9
    assert zero_bubble(asked, [2 * c for c in counts]).makespan_s <= doubled_s + 1e-9


def test_close_to_the_best_of_all_launch_counts() -> None:
    """Against every vector of counts of a small pipeline, with whole backward passes."""
    times, m = [0.6, 1.0, 0.8], 8
    asked = pipeline(times, [0.7, 0.2], m)
    passes = [PassTimes(t / 3, 2 * t / 3) for t in times]
    best_s = min(
        pipeline_time_s(passes, asked.forward_hops, asked.backward_hops, m, counts)
        for counts in itertools.product(range(m, 0, -1), repeat=3)
        if counts[0] >= counts[1] >= counts[2]
    )
    assert synthesise(asked, split=False).makespan_s <= best_s * 1.01
