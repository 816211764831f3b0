"""Rules of PyTorch's caching allocator on small cases, and replays of runs under them."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from replay_allocator import (
    Allocator,
    fits,
    largest_released,
    least_card_bytes,
    peak_bytes,
    stretched,
)

MIB = 1 << 20
ROOM = 1 << 40


@pytest.mark.parametrize(
    ("num_bytes", "reserved"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)],
)
def test_segments_are_as_large_as_the_allocator_asks_for(num_bytes: int, reserved: int) -> None:
    allocator = Allocator(ROOM)
    assert allocator.allocate(num_bytes) is not None
    assert allocator.reserved == reserved * MIB


def test_a_segment_is_shared_and_joined_again() -> None:
    allocator = Allocator(20 * MIB)
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert all(blocks) and allocator.reserved == 20 * MIB
    assert allocator.allocate(2 * MIB) is None
    for block in (blocks[1], blocks[3], blocks[2]):
        assert block is not None
        allocator.release(block)
    assert allocator.allocate(15 * MIB) is not None and allocator.reserved == 20 * MIB


def test_a_hole_beside_a_living_tensor_is_lost_and_a_free_segment_is_not() -> None:
    """Three tensors of 30 MiB are let go; in one's place lives a small one."""
    trace = [(0, 30 * MIB), (1, 30 * MIB), (2, 30 * MIB), (0, 0), (1, 0), (2, 0), (3, 2 * MIB)]
    last = (4, 60 * MIB)
    assert fits([*trace, last], 90 * MIB)
    assert not fits([*trace, last], 80 * MIB)
    assert least_card_bytes([*trace, last]) == pytest.approx(90 * MIB, abs=2 * MIB)
    assert largest_released([*trace, last] + [(9, 1)] * 20) == 30 * MIB


def test_random_traces_never_hold_more_than_they_reserve_and_end_empty() -> None:
    rng = Random(5)
    for _ in range(20):
        allocator, living, held = Allocator(ROOM), {}, 0
        for number in range(300):
            if living and rng.random() < 0.5:
                key = rng.choice(list(living))
                block, size = living.pop(key)
                allocator.release(block)
                held -= size
            else:
                size = rng.choice((100, MIB // 2, 3 * MIB, 40 * MIB)) + rng.randrange(9999)
                block = allocator.allocate(size)
                living[number] = block, size
                held += size
            assert held <= allocator.reserved
        for block, _ in living.values():
            allocator.release(block)
        allocator._release_segments()
        assert allocator.reserved == 0 and not any(allocator._free.values())


def test_a_stretched_trace_has_about_the_peak() -> None:
    trace = [(0, 1000), (1, 500), (0, 0), (2, 700)]
    assert peak_bytes(trace) == 1500
    assert peak_bytes(stretched(trace, 10**9)) == pytest.approx(10**9, rel=0.01)
