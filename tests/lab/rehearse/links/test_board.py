"""Shared memory of ranks: messages, and paths that carry one at a time."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.lab.rehearse.links.board import MOST_DUE, Board

KEY = ("message", 0, 1, 1)


def test_a_path_carries_one_message_at_a_time() -> None:
    board = Board(num_paths=2, num_slots=8)
    assert board.take(KEY, [((0,), 2.0)], 10.0) == 12.0
    assert board.take(KEY, [((0,), 2.0)], 11.0) == 14.0
    assert board.take(KEY, [((1,), 2.0)], 11.0) == 13.0
    assert board.take(KEY, [((0, 1), 1.0)], 11.0) == 15.0, "it needs both paths at once"


def test_a_rank_that_comes_late_takes_the_gap_of_its_own_time() -> None:
    board = Board(num_paths=1, num_slots=8)
    board.take(KEY, [((0,), 1.0)], 20.0)
    assert board.take(KEY, [((0,), 1.0)], 15.0) == 16.0
    assert board.take(KEY, [((0,), 4.0)], 15.5) == 20.0
    assert board.take(KEY, [((0,), 0.5)], 15.5) == 21.5, "no gap is left"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=20))
def test_messages_never_overlap(asked: list[tuple[int, int]]) -> None:
    board = Board(num_paths=1, num_slots=8)
    taken = []
    for from_s, seconds in asked:
        end_s = board.take(KEY, [((0,), float(seconds))], float(from_s))
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


def test_what_is_due_on_a_path_takes_it_in_the_order_of_the_ranks_times() -> None:
    board = Board(num_paths=2, num_slots=8)
    late, early, elsewhere = ("message", 0, 1, 1), ("message", 2, 3, 1), ("message", 2, 4, 1)
    hops, other = [((0,), 2.0)], [((1,), 2.0)]
    board.announce(late, hops, 10.0)
    board.announce(early, hops, 9.0)
    board.announce(elsewhere, other, 8.0)
    assert not board.is_its_turn(late, hops, 10.0), "whoever asks first"
    assert board.is_its_turn(early, hops, 9.0)
    assert board.take(early, hops, 9.0) == 11.0
    assert board.is_its_turn(late, hops, 10.0)
    assert board.take(late, hops, 10.0) == 13.0
    assert not board.is_its_turn(late, [((0, 1), 1.0)], 10.0), "a path of the two is due"


def test_of_two_that_come_at_once_the_same_one_is_first_in_every_run() -> None:
    keys, hops = [("message", 0, 1, 1), ("message", 1, 0, 1)], [((0,), 2.0)]
    first = []
    for announced in (keys, keys[::-1]):
        board = Board(num_paths=1, num_slots=8)
        for key in announced:
            board.announce(key, hops, 10.0)
        first.append([key for key in keys if board.is_its_turn(key, hops, 10.0)])
    assert len(first[0]) == 1
    assert first[0] == first[1]


def test_a_path_on_which_too_much_is_due_is_an_error() -> None:
    board = Board(num_paths=1, num_slots=8)
    for number in range(MOST_DUE):
        board.announce(("message", number), [((0,), 1.0)], 1.0)
    with pytest.raises(CheckFailedError, match=f"more than {MOST_DUE}"):
        board.announce(("one more",), [((0,), 1.0)], 1.0)


def test_a_collective_is_due_when_the_last_of_its_ranks_has_come() -> None:
    board = Board(num_paths=1, num_slots=8)
    key, behind, hops = ("collective", (0, 1), "group", 1), ("message", 2, 3, 1), [((0,), 2.0)]
    board.come(key, 5.0, 2, hops)
    assert board.is_its_turn(behind, hops, 8.0)
    board.come(key, 7.0, 2, hops)
    assert not board.is_its_turn(behind, hops, 8.0)
    assert board.is_its_turn(key, hops, 7.0)
    board.take(key, hops, 7.0)
    assert board.is_its_turn(behind, hops, 8.0)


def test_what_is_announced_after_its_turn_says_how_much_was_out_of_turn() -> None:
    board = Board(num_paths=2, num_slots=8)
    first, second, hops = ("message", 0, 1, 1), ("message", 2, 3, 1), [((0,), 2.0)]
    assert board.announce(second, hops, 10.0) == 0.0
    board.take(second, hops, 10.0)
    assert board.announce(first, hops, 9.0) == 4.0, "its own two seconds reach into them"
    assert board.announce(("message", 4, 5, 1), hops, 7.5) == 0.0, "it is through before"
    assert board.announce(("message", 4, 5, 2), hops, 11.0) == 0.0, "it did come later"
    assert board.announce(("message", 4, 5, 3), [((1,), 2.0)], 9.0) == 0.0, "another path"
