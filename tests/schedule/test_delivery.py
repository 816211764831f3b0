from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.schedule.delivery import arrived_sends, receive_windows
from megatron_hetero.schedule.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.programme import SENDS, Message, Schedule

counts = st.lists(st.integers(1, 9), min_size=2, max_size=6).map(lambda c: sorted(c, reverse=True))


@given(counts, st.integers(1, 16))
def test_windows_of_1f1b_follow_from_the_launch_counts(
    launched: list[int], num_micro_batches: int
) -> None:
    """Before a stage takes its next forward, the one before it may be ahead by the difference of
    their launches, and one more that answers to the gradient just sent."""
    schedule = one_f_one_b(len(launched), num_micro_batches, launched)
    launched = [min(count, num_micro_batches) for count in launched]
    for stage in range(len(launched)):
        windows = receive_windows(schedule, stage)
        if stage > 0:
            ahead = launched[stage - 1] - launched[stage] + 1
            assert windows[stage - 1, True] <= max(ahead, launched[stage - 1])
            assert windows[stage - 1, True] >= min(ahead, num_micro_batches)
        assert set(windows) == {(s, s < stage) for s in (stage - 1, stage) if _exists(schedule, s)}


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
    assert receive_windows(schedule, 1) == {(0, True): 5}
    assert receive_windows(schedule, 0) == {(0, False): 5}
    assert receive_windows(one_f_one_b(2, 8), 0) == {(0, False): 2}


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


def _exists(schedule: Schedule, boundary: int) -> bool:
    return 0 <= boundary < schedule.num_stages - 1
