from __future__ import annotations

import pytest

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.programme import Message, Operation, Schedule, build_schedule


def all_forwards_first(num_chunks: int, num_micro_batches: int) -> list[Operation]:
    """All forwards chunk by chunk, then all backwards in the reverse order of chunks."""
    micro_batches = range(num_micro_batches)
    chunks = range(num_chunks)
    return [
        *(Operation("forward", k, c) for c in chunks for k in micro_batches),
        *(Operation("backward", k, c) for c in reversed(chunks) for k in micro_batches),
    ]


def test_two_chunks_on_each_of_two_stages_wrap_around() -> None:
    schedule = build_schedule([all_forwards_first(2, 2)] * 2, 2, (0, 1, 0, 1))
    assert [schedule.place(v) for v in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    sent = Operation("send_forward", 1, 0)
    assert schedule.message(1, sent) == Message(1, True, 1)
    assert schedule.message(0, Operation("recv_forward", 1, 1)) == Message(1, True, 1)
    assert schedule.message(0, Operation("send_backward", 0, 1)) == Message(1, False, 0)
    assert schedule.message(1, Operation("recv_backward", 0, 0)) == Message(1, False, 0)
    first = [str(o) for instruction in schedule.programmes[0] for o in instruction]
    assert first[:4] == ["forward(0)", "send_forward(0)", "forward(1)", "send_forward(1)"]
    assert first[4:6] == ["recv_forward(0, chunk 1)", "forward(0, chunk 1)"]
    check_schedule(schedule)


def test_unlike_numbers_of_chunks() -> None:
    orders = [all_forwards_first(n, 3) for n in (1, 2, 2)]
    check_schedule(build_schedule(orders, 3, (0, 1, 2, 1, 2)))


def test_backward_in_two_parts() -> None:
    order = [
        Operation("forward", 0),
        Operation("backward_input", 0),
        Operation("backward_weight", 0),
    ]
    schedule = build_schedule([order, order], 1)
    assert [str(i[0]) for i in schedule.programmes[1]][:5] == [
        "recv_forward(0)",
        "forward(0)",
        "backward_input(0)",
        "send_backward(0)",
        "backward_weight(0)",
    ]
    check_schedule(schedule)


@pytest.mark.parametrize("chain", [(0, 0, 1), (0, 1, 2), (0, 0), (1, 1)])
def test_chains_that_no_pipeline_has(chain: tuple[int, ...]) -> None:
    with pytest.raises(PlanFormatError, match="does not suit 2 stages"):
        build_schedule([[], []], 1, chain)


def test_a_chunk_each_is_the_default() -> None:
    assert Schedule(((), (), ()), 1).chain == (0, 1, 2)
