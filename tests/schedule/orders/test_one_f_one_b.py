from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts, one_f_one_b


def words(num_stages: int, num_micro_batches: int, stage: int) -> list[str]:
    programme = one_f_one_b(num_stages, num_micro_batches).programmes[stage]
    return [" + ".join(str(o) for o in instruction) for instruction in programme]


def test_first_of_two_stages_runs_megatrons_order() -> None:
    assert words(2, 2, 0) == [
        "forward(0)",
        "send_forward(0)",
        "forward(1)",
        "send_forward(1) + recv_backward(0)",
        "backward(0)",
        "recv_backward(1)",
        "backward(1)",
        "gradient_sync",
        "step",
    ]


def test_last_of_two_stages_alternates_from_the_start() -> None:
    assert words(2, 2, 1) == [
        "recv_forward(0)",
        "forward(0)",
        "backward(0)",
        "send_backward(0) + recv_forward(1)",
        "forward(1)",
        "backward(1)",
        "send_backward(1)",
        "gradient_sync",
        "step",
    ]


def test_a_single_stage_sends_nothing() -> None:
    assert words(1, 1, 0) == ["forward(0)", "backward(0)", "gradient_sync", "step"]


@given(st.integers(1, 8), st.integers(1, 20))
def test_own_launch_counts_are_the_default(num_stages: int, num_micro_batches: int) -> None:
    own = list(range(num_stages, 0, -1))
    assert one_f_one_b(num_stages, num_micro_batches, own) == one_f_one_b(
        num_stages, num_micro_batches
    )


@pytest.mark.parametrize("counts", [[1, 2], [2, 0], [1], [3, 2, 1]])
def test_bad_launch_counts_are_refused(counts: list[int]) -> None:
    with pytest.raises(PlanFormatError, match="launch counts"):
        one_f_one_b(2, 4, counts)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(PlanFormatError, match="at least one stage"):
        one_f_one_b(0, 4)


@pytest.mark.parametrize(
    ("hop_s", "counts"),
    [(0, (4, 3, 2, 1)), (0.1, (5, 4, 2, 1)), (1, (6, 5, 2, 1)), (2, (8, 7, 2, 1))],
)
def test_launch_counts_cover_the_round_trip(hop_s: float, counts: tuple[int, ...]) -> None:
    assert launch_counts([1.0] * 4, [0, hop_s, 0]) == counts
