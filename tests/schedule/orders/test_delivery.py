from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.schedule.orders.delivery import (
    arrived_sends,
    posts_within,
    receive_posts,
    receive_windows,
)
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.programme import RECEIVES, SENDS, Message, Schedule

counts = st.lists(st.integers(1, 9), min_size=2, max_size=6).map(lambda c: sorted(c, reverse=True))


def windows(schedule: Schedule, stage: int) -> dict[int, int]:
    posts = receive_posts(schedule, stage)
    return receive_windows(schedule.programmes[stage], posts, schedule, stage)


@given(counts, st.integers(1, 16))
def test_every_receive_is_posted_once_and_in_time(
    launched: list[int], num_micro_batches: int
) -> None:
    schedule = one_f_one_b(len(launched), num_micro_batches, launched)
    for stage, programme in enumerate(schedule.programmes):
        posted: Counter[int] = Counter()
        taken: Counter[int] = Counter()
        for instruction, boundaries in zip(programme, receive_posts(schedule, stage), strict=True):
            posted.update(boundaries)
            for operation in instruction:
                if operation.kind in RECEIVES:
                    boundary = schedule.message(stage, operation).boundary
                    taken[boundary] += 1
                    assert taken[boundary] <= posted[boundary]
        assert posted == taken


@given(counts, st.integers(1, 16))
def test_as_many_are_posted_as_the_launch_counts_differ(
    launched: list[int], num_micro_batches: int
) -> None:
    """Once a stage has launched its own, the one before it is ahead by the difference, and one more
    that answers to the gradient just sent."""
    schedule = one_f_one_b(len(launched), num_micro_batches, launched)
    for stage in range(1, len(launched)):
        posts = receive_posts(schedule, stage)
        open_now, launched_now = 0, 0
        for instruction, boundaries in zip(schedule.programmes[stage], posts, strict=True):
            open_now += boundaries.count(stage - 1)
            for operation in instruction:
                launched_now += operation.kind == "forward"
                open_now -= operation.kind == "recv_forward"
            if launched_now >= min(launched[stage], num_micro_batches):
                assert open_now <= launched[stage - 1] - launched[stage] + 1
        assert windows(schedule, stage)[stage - 1] == min(launched[stage - 1], num_micro_batches)


@given(counts, st.integers(1, 16))
def test_validation_posts_within_a_window(launched: list[int], num_micro_batches: int) -> None:
    schedule = one_f_one_b(len(launched), num_micro_batches, launched)
    for stage in range(1, len(launched)):
        forwards = [
            tuple(o for o in i if o.kind.endswith("forward")) for i in schedule.programmes[stage]
        ]
        programme = [instruction for instruction in forwards if instruction]
        posts = posts_within(programme, {stage - 1: 3, stage: 2}, schedule, stage)
        assert sum(map(len, posts)) == num_micro_batches
        most = receive_windows(programme, posts, schedule, stage)
        assert most == {stage - 1: min(3, num_micro_batches)}


@given(counts, st.integers(1, 16))
def test_what_has_arrived_was_taken_before_the_answer_was_sent(
    launched: list[int], num_micro_batches: int
) -> None:
    """A gradient tells that its own forward has arrived; never more than were sent."""
    schedule = one_f_one_b(len(launched), num_micro_batches, launched)
    for stage in range(len(launched) - 1):
        arrived = arrived_sends(schedule, stage)
        for k in range(num_micro_batches):
            assert k + 1 <= arrived[Message(stage, False, k)] <= num_micro_batches


def test_known_arrivals_of_two_stages() -> None:
    """Stage 1 takes forward k, then sends gradient k; stage 0 takes gradient k before forward
    k + 2."""
    schedule = one_f_one_b(2, 4)
    assert arrived_sends(schedule, 0) == {Message(0, False, k): k + 1 for k in range(4)}
    assert arrived_sends(schedule, 1) == {Message(0, True, k): max(0, k - 1) for k in range(4)}


def test_windows_of_two_stages() -> None:
    schedule = one_f_one_b(2, 8, (5, 1))
    assert windows(schedule, 1) == {0: 5}
    assert windows(schedule, 0) == {0: 5}
    assert windows(one_f_one_b(2, 8), 0) == {0: 2}


def test_all_sends_are_counted_once() -> None:
    schedule = one_f_one_b(3, 5)
    sent = [
        schedule.message(stage, operation)
        for stage, programme in enumerate(schedule.programmes)
        for instruction in programme
        for operation in instruction
        if operation.kind in SENDS
    ]
    assert len(sent) == len(set(sent)) == 2 * 2 * 5
