"""What ranks share: messages, and paths that carry one at a time."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.runtime.rehearse.board import Board


def test_a_path_carries_one_message_at_a_time() -> None:
    board = Board(num_paths=2, num_slots=8)
    assert board.take([((0,), 2.0)], 10.0) == 12.0
    assert board.take([((0,), 2.0)], 11.0) == 14.0
    assert board.take([((1,), 2.0)], 11.0) == 13.0
    assert board.take([((0, 1), 1.0)], 11.0) == 15.0, "it needs both paths at once"


def test_a_rank_that_comes_late_takes_the_gap_of_its_own_time() -> None:
    board = Board(num_paths=1, num_slots=8)
    board.take([((0,), 1.0)], 20.0)
    assert board.take([((0,), 1.0)], 15.0) == 16.0
    assert board.take([((0,), 4.0)], 15.5) == 20.0
    assert board.take([((0,), 0.5)], 15.5) == 21.5, "no gap is left"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=20))
def test_messages_never_overlap(asked: list[tuple[int, int]]) -> None:
    board = Board(num_paths=1, num_slots=8)
    taken = []
    for from_s, seconds in asked:
        end_s = board.take([((0,), float(seconds))], float(from_s))
        assert end_s >= from_s + seconds
        taken.append((end_s - seconds, end_s))
    taken.sort()
    assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:], strict=False))  # noqa: RUF007


def test_messages_are_told_apart() -> None:
    board = Board(num_paths=1, num_slots=4)
    board.come(("message", 0, 1, 1), 5.0)
    board.come(("message", 0, 1, 1), 4.0)
    assert board.latest_s(("message", 0, 1, 1)) == 5.0
    assert board.latest_s(("message", 0, 1, 2)) == 0.0
    board.come(("a",), 1.0)
    board.come(("b",), 1.0)
    with pytest.raises(CheckFailedError, match="more than 4"):
        board.come(("c",), 1.0)


def test_what_ends_early_on_one_rank_waits_for_the_others() -> None:
    """A broadcast's root need not wait for its receivers."""
    board = Board(num_paths=1, num_slots=4)
    key = ("collective", (0, 1), "group", 1)
    board.come(key, 1.0)
    waiting = threading.Thread(target=board.wait_for, args=(key, 2), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    board.come(key, 3.0)
    waiting.join(10.0)
    assert not waiting.is_alive()
    assert board.latest_s(key) == 3.0
