"""Room for buckets under way, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.sync.room import (
    LEAST_AT_ONCE,
    MOST_AT_ONCE,
    least_rooms,
    num_copies,
    part_of_room,
    room_of,
)


def test_the_room_is_what_activations_and_the_plan_leave() -> None:
    """Of 1,000 bytes 200 + 3 * 100 are kept, of them 3 * 40 activations."""
    memory = StageMemory(
        {"weights": 200, "activations": 0}, {"weights": 60, "activations": 40}, 1000
    )
    assert room_of(memory, 3, overlaps=True) == 500
    assert room_of(memory, 3, overlaps=False) == 620


def test_copies_of_a_bucket_under_way() -> None:
    """In place it takes nothing; packed once; what is received beside it once more."""
    found = [num_copies(is_packed=p, is_received=r) for p in (False, True) for r in (False, True)]
    assert found == [0, 1, 1, 2]


def test_parts_of_a_room() -> None:
    assert part_of_room(0, 100) == 0.0
    assert part_of_room(20, 100) == pytest.approx(0.2)
    assert part_of_room(90, 100) == part_of_room(90, 0) == part_of_room(90, -1) == 0.5
    assert part_of_room(1, 1e9) == 1 / 128


@given(st.floats(1, 1e12), st.floats(-1e12, 1e12))
def test_two_are_always_under_way_and_no_more_than_memory_or_the_gpu_has(
    num_bytes: float, room: float
) -> None:
    part = part_of_room(num_bytes, room)
    at_once = int(1 / part + 1e-9)
    assert LEAST_AT_ONCE <= at_once <= MOST_AT_ONCE
    assert at_once == LEAST_AT_ONCE or at_once * num_bytes <= room * (1 + 1e-9)


def test_of_those_that_come_together_the_least_room_counts() -> None:
    rooms = {(0, 0): 5, (0, 1): 7, (1, 0): 3, (1, 1): 9, (2, 0): 1}
    assert least_rooms(rooms, [0, 0, 2]) == {(0, 0): 3, (0, 1): 7, (2, 0): 1}
