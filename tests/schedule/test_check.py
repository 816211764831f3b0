from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.programme import Operation, Schedule


@given(st.integers(1, 8), st.integers(1, 32))
def test_fused_1f1b_never_deadlocks(num_stages: int, num_micro_batches: int) -> None:
    check_schedule(one_f_one_b(num_stages, num_micro_batches), "rendezvous")


@given(st.integers(2, 8), st.integers(2, 32))
def test_plain_send_then_receive_deadlocks(num_stages: int, num_micro_batches: int) -> None:
    fused = one_f_one_b(num_stages, num_micro_batches)
    plain = Schedule(
        tuple(
            tuple((operation,) for instruction in programme for operation in instruction)
            for programme in fused.programmes
        ),
        num_micro_batches,
    )
    with pytest.raises(CheckFailedError, match=r"deadlocks.*send_forward.* -> .*send_backward"):
        check_schedule(plain, "rendezvous")
    check_schedule(plain)


def test_counts_far_ahead_need_buffered_sends() -> None:
    """Why the runtime waits for its receives alone."""
    ahead = one_f_one_b(4, 64, (6, 5, 2, 1))
    with pytest.raises(CheckFailedError, match="deadlocks"):
        check_schedule(ahead, "rendezvous")
    check_schedule(ahead)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 16))
def test_counts_that_fall_never_deadlock(counts: list[int], num_micro_batches: int) -> None:
    falling = sorted(counts, reverse=True)
    check_schedule(one_f_one_b(len(counts), num_micro_batches, falling))


def test_receives_that_wait_for_each_other_deadlock_with_buffers_too() -> None:
    """Stage 0 wants the gradient of micro-batch 0 before it sends the activation."""
    first = (
        (Operation("forward", 0),),
        (Operation("recv_backward", 0),),
        (Operation("send_forward", 0),),
        (Operation("backward", 0),),
    )
    schedule = Schedule((first, one_f_one_b(2, 1).programmes[1]), 1)
    with pytest.raises(CheckFailedError, match=r"deadlocks.*recv_backward"):
        check_schedule(schedule)


def test_a_lost_message_is_found() -> None:
    schedule = one_f_one_b(2, 2)
    first = tuple(i for i in schedule.programmes[0] if i != (Operation("send_forward", 0),))
    with pytest.raises(CheckFailedError, match=r"stage 0 sends micro-batches \[1\]"):
        check_schedule(Schedule((first, schedule.programmes[1]), 2))


def test_missing_and_misplaced_work_is_found() -> None:
    schedule = one_f_one_b(1, 2)
    with pytest.raises(CheckFailedError, match=r"micro-batch 1: forward 1 times, backward 0"):
        check_schedule(Schedule((schedule.programmes[0][:3],), 2))
    swapped = tuple(reversed(schedule.programmes[0][:2])) + schedule.programmes[0][2:]
    with pytest.raises(CheckFailedError, match=r"backward\(0\) before forward\(0\)"):
        check_schedule(Schedule((swapped,), 2))
