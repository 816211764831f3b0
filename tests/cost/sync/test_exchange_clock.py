"""When exchanges that share paths end: by hand, and beside a plain queue for each path."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cost.network.holder_flow import Flow
from megatron_hetero.cost.sync.exchange_clock import ExchangeStep, last_end_s


def flow(seconds: dict[int, float], latency_s: float = 0.0) -> Flow:
    return Flow(
        np.array(list(seconds), np.int64), np.array(list(seconds.values()), float), latency_s
    )


def step(
    seconds: dict[int, float],
    first_s: float = 0.0,
    last_s: float | None = None,
    latency_s: float = 0.0,
    **more: object,
) -> ExchangeStep:
    last_s = first_s if last_s is None else last_s
    holders = more.pop("holders", ((0, 0),))
    return ExchangeStep(holders, flow(seconds, latency_s), first_s, last_s, **more)  # type: ignore[arg-type]


def test_none_ends_at_once() -> None:
    assert last_end_s([]) == 0.0
    assert last_end_s([step({})]) == 0.0


def test_one_exchange_ends_after_its_busiest_path_and_its_latency() -> None:
    assert last_end_s([step({0: 2.0, 1: 5.0}, 3.0, latency_s=0.5)]) == pytest.approx(8.5)


def test_two_on_one_path_take_turns_and_on_two_do_not() -> None:
    assert last_end_s([step({0: 2.0}), step({0: 3.0})]) == pytest.approx(5.0)
    assert last_end_s([step({0: 2.0}), step({1: 3.0})]) == pytest.approx(3.0)


def test_who_begins_first_is_first_on_the_path() -> None:
    """The second, listed first, waits from 1 to 4 for the path."""
    late, early = step({0: 2.0}, 1.0), step({0: 4.0}, 0.0)
    assert last_end_s([late, early]) == pytest.approx(6.0)


def test_what_boundaries_carry_takes_paths_too() -> None:
    assert last_end_s([step({0: 2.0})], {0: 7.0}) == pytest.approx(9.0)
    assert last_end_s([step({0: 2.0})], {3: 7.0}) == pytest.approx(2.0)
    assert last_end_s([step({0: 2.0}, 20.0)], {0: 7.0}) == pytest.approx(22.0)


def test_the_last_bucket_is_only_there_when_it_is_complete() -> None:
    """Four equal buckets of 1 s: the last is complete at 10 s, and takes 1 s from there."""
    one = step({0: 4.0}, 0.0, 10.0, bucket_share=0.25)
    assert one.num_buckets == 4 and one.last_bucket_s == pytest.approx(1.0)
    assert last_end_s([one]) == pytest.approx(11.0)


@pytest.mark.parametrize(
    ("share", "count", "last"), [(1.0, 1, 6.0), (0.5, 2, 3.0), (0.4, 3, 1.2), (1 / 3, 3, 2.0)]
)
def test_buckets_of_an_exchange(share: float, count: int, last: float) -> None:
    one = step({0: 6.0, 1: 1.0}, bucket_share=share)
    assert one.num_buckets == count
    assert one.longest_s == 6.0
    assert one.last_bucket_s == pytest.approx(last)


def test_a_window_is_as_many_buckets_as_have_room() -> None:
    assert step({0: 1.0}).window == inf
    assert step({0: 1.0}, buffers={(0, 0): 0.5}).window == 2
    assert step({0: 1.0}, buffers={(0, 0): 0.3}).window == 3
    assert step({0: 1.0}, buffers={(0, 0): 0.5, (1, 0): 1.0}).window == 1
    assert step({0: 1.0}, buffers={(0, 0): 4 * 0.5}).window == 0.5


def test_latency_is_hidden_by_a_second_bucket_and_not_by_one() -> None:
    """Ten buckets of 1 s and 0.5 s of latency: with room for one each bucket waits for the latency
    of the one before."""
    common = {"bucket_share": 0.1, "latency_s": 0.5}
    two = step({0: 10.0}, buffers={(0, 0): 0.5}, **common)  # type: ignore[arg-type]
    one = step({0: 10.0}, buffers={(0, 0): 1.0}, **common)  # type: ignore[arg-type]
    assert last_end_s([two]) == pytest.approx(10.5)
    assert last_end_s([one]) == pytest.approx(10.5 + 9 * 0.5)


def test_long_latency_is_not_hidden_by_room_for_two_either() -> None:
    """Buckets of 1 s and 3 s of latency: two at a time come every (1 + 3) / 2 seconds."""
    one = step({0: 10.0}, buffers={(0, 0): 0.5}, bucket_share=0.1, latency_s=3.0)
    assert last_end_s([one]) == pytest.approx(10.0 + 3.0 + 8 * (2.0 - 1.0))


@given(st.integers(1, 20), st.integers(1, 20), st.floats(0, 9))
def test_buckets_wait_for_room_as_one_by_one(num: int, at_once: int, latency_s: float) -> None:
    """`num` buckets of 1 s on one path, each of which begins when the one that is `at_once` before
    it has arrived. The formula may be late by a round that is not full."""
    sent_s, arrived_s = 0.0, [0.0] * at_once
    for _ in range(num):
        sent_s = max(sent_s, arrived_s[-at_once]) + 1.0
        arrived_s.append(sent_s + latency_s)
    one = step({0: num}, buffers={(0, 0): 1 / at_once}, bucket_share=1 / num, latency_s=latency_s)
    late_s = last_end_s([one]) - arrived_s[-1]
    if num <= at_once or num % at_once == 0:
        assert late_s == pytest.approx(0.0, abs=1e-6)
    assert abs(late_s) <= max(0.0, 1 + latency_s - at_once) + 1e-6


def test_a_bucket_of_several_rank_sets_goes_in_turns_where_they_find_no_room() -> None:
    """Four rank sets, of which two have room: each turn has the latency."""
    one = step({0: 10.0}, buffers={(0, 0): 4 * 0.5}, bucket_share=0.1, latency_s=3.0)
    assert last_end_s([one]) == pytest.approx(10.0 + 10 * 2 * 3.0)


def test_a_holder_comes_to_its_next_exchange_when_there_is_room() -> None:
    """Each takes all the room: the second begins when the first has ended, on another path."""
    whole = {"holders": ((0, 0),), "buffers": {(0, 0): 1.0}}
    after = last_end_s([step({0: 4.0}, **whole), step({1: 3.0}, **whole)])  # type: ignore[arg-type]
    assert after == pytest.approx(7.0)
    half = {"holders": ((0, 0),), "buffers": {(0, 0): 0.5}}
    beside = last_end_s([step({0: 4.0}, **half), step({1: 3.0}, **half)])  # type: ignore[arg-type]
    assert beside == pytest.approx(4.0)


def test_an_exchange_waits_for_the_last_of_its_holders() -> None:
    """Stage (1, 0) is busy for 6 s before it comes to what both exchange."""
    buffers = {(0, 0): 1.0, (1, 0): 1.0}
    steps = [
        step({0: 6.0}, holders=((1, 0),), buffers={(1, 0): 1.0}),
        step({1: 2.0}, holders=((0, 0), (1, 0)), buffers=buffers),
    ]
    assert last_end_s(steps) == pytest.approx(8.0)


steps_of = st.lists(
    st.builds(
        lambda seconds, first, more, latency: step(seconds, first, first + more, latency),
        st.dictionaries(st.integers(0, 4), st.floats(0.1, 5), min_size=1),
        st.floats(0, 10),
        st.floats(0, 4),
        st.floats(0, 1),
    ),
    min_size=1,
    max_size=6,
)


def plain_queue(steps: list[ExchangeStep]) -> float:
    """A queue for each path; all by the time at which they begin."""
    free: dict[int, float] = {}
    end_s = 0.0
    for one in sorted(steps, key=lambda s: s.first_s):
        ends = []
        for path, seconds in zip(one.flow.paths.tolist(), one.flow.seconds.tolist(), strict=True):
            free[path] = max(free.get(path, 0.0), one.first_s) + seconds
            ends.append(free[path])
        done_s = max(max(ends), one.last_s + float(one.flow.seconds.max()))
        end_s = max(end_s, done_s + one.flow.latency_s)
    return end_s


@settings(max_examples=40)
@given(steps_of)
def test_without_buffers_paths_are_plain_queues(steps: list[ExchangeStep]) -> None:
    assert last_end_s(steps) == pytest.approx(plain_queue(steps))


@settings(max_examples=40)
@given(steps_of, st.dictionaries(st.integers(0, 4), st.floats(0, 5)))
def test_ends_are_never_before_the_work_of_a_path(
    steps: list[ExchangeStep], carried: dict[int, float]
) -> None:
    busy: dict[int, float] = dict(carried)
    for one in steps:
        for path, seconds in zip(one.flow.paths.tolist(), one.flow.seconds.tolist(), strict=True):
            busy[path] = busy.get(path, 0.0) + seconds
    used = {path for one in steps for path in one.flow.paths.tolist()}
    end_s = last_end_s(steps, carried)
    assert end_s >= max(busy[path] for path in used) - 1e-9
    for one in steps:
        assert end_s >= one.last_s + one.longest_s + one.flow.latency_s - 1e-9
    # What is carried beside never makes it sooner.
    assert end_s >= last_end_s(steps) - 1e-9
