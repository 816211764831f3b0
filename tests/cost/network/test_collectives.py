"""Collectives of a group: rounds of a ring, and measured constants over NVLink."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.node_links import Link, NvlinkCurve
from megatron_hetero.cluster.nvlink import nvlink_curve
from megatron_hetero.cost.network.collectives import (
    all_gather_s,
    all_reduce_s,
    context_parallel_times,
    end_exchanges,
    reduce_scatter_s,
    ring_all_gather_s,
    ring_all_reduce_s,
    ring_reduce_scatter_s,
)
from megatron_hetero.cost.network.seconds import worst_link

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from make_nvlink import Point, points

LINK = Link(1e9, 1e-3)
CURVE = NvlinkCurve(
    small_call_s=10e-6,
    small_step_s=1e-6,
    small_part=0.25,
    large_call_s=40e-6,
    large_step_s=2e-6,
    gather_part=0.8,
    part_of_sheet=0.7,
    group_parts=((2, 0.5), (8, 1.0)),
)
NVLINK = Link(100e9, 5e-6, nvlink=CURVE)


def test_ring_all_reduce_is_two_n_minus_one_rounds() -> None:
    assert ring_all_reduce_s(4e9, 4, LINK) == pytest.approx(6 * (1e-3 + 1))
    assert ring_all_gather_s(4e9, 4, LINK) == pytest.approx(3 * (1e-3 + 1))
    assert ring_all_reduce_s(4e9, 1, LINK) == 0


def test_rings_that_crowd_a_bus_have_the_bandwidth_of_their_size() -> None:
    link = Link(8e9, 0.0, group_bytes_per_s=((4, 2e9), (8, 1e9)))
    plain = {n: ring_all_reduce_s(8e9, n, Link(8e9, 0.0)) for n in (2, 3, 4, 6, 8)}
    found = {n: ring_all_reduce_s(8e9, n, link) / plain[n] for n in plain}
    assert found == {2: 1, 3: 1, 4: 4, 6: 4, 8: 8}
    both = worst_link([link, Link(4e9, 1e-6)])
    assert [both.ring_bytes_per_s(n) for n in (2, 4, 8)] == [4e9, 2e9, 1e9]


def test_small_buffers_take_calls_and_steps_and_large_ones_their_bytes() -> None:
    """By hand, of eight and of two GPUs: steps, bytes that each sends, protocols' constants."""
    # 8 KB: 14 steps of the small protocol, 14 KB at 25 GB/s; 7 steps, 7 KB.
    assert all_reduce_s(8e3, 8, NVLINK) == pytest.approx((10 + 14 + 14 / 25) * 1e-6)
    assert all_gather_s(8e3, 8, NVLINK) == pytest.approx((10 + 7 + 7 / 25) * 1e-6)
    # 800 MB of eight: 1.4 GB at 100 GB/s; 0.7 GB at four fifths of that.
    assert all_reduce_s(800e6, 8, NVLINK) == pytest.approx((40 + 28 + 14000) * 1e-6)
    assert all_gather_s(800e6, 8, NVLINK) == pytest.approx((40 + 14 + 7000 / 0.8) * 1e-6)
    assert reduce_scatter_s(800e6, 8, NVLINK) == all_gather_s(800e6, 8, NVLINK)
    # Of two: 800 MB at half of the bandwidth.
    assert all_reduce_s(800e6, 2, NVLINK) == pytest.approx((40 + 4 + 800e6 / 50e9 * 1e6) * 1e-6)
    assert all_reduce_s(800e6, 1, NVLINK) == all_gather_s(800e6, 1, NVLINK) == 0


def test_groups_of_the_file_and_adding_count_over_nvlink_too() -> None:
    own = replace(NVLINK, group_bytes_per_s=((2, 90e9),))
    assert all_reduce_s(800e6, 2, own) == pytest.approx(44e-6 + 800e6 / 90e9)
    slow = replace(NVLINK, reduce_bytes_per_s=1e12)
    added_s = 3 * 700e6 / 1e12
    assert reduce_scatter_s(800e6, 8, slow) == pytest.approx(
        reduce_scatter_s(800e6, 8, NVLINK) + added_s
    )
    assert all_reduce_s(800e6, 8, slow) == pytest.approx(all_reduce_s(800e6, 8, NVLINK) + added_s)
    assert all_gather_s(800e6, 8, slow) == all_gather_s(800e6, 8, NVLINK)


def test_a_link_without_tables_has_the_rounds_of_a_ring() -> None:
    for num in (1, 2, 5):
        assert all_reduce_s(1e6, num, LINK) == ring_all_reduce_s(1e6, num, LINK)
        assert all_gather_s(1e6, num, LINK) == ring_all_gather_s(1e6, num, LINK)
        assert reduce_scatter_s(1e6, num, LINK) == ring_reduce_scatter_s(1e6, num, LINK)


@pytest.mark.parametrize("operation", [all_reduce_s, all_gather_s, reduce_scatter_s])
def test_more_bytes_and_more_steps_never_take_less(operation) -> None:  # type: ignore[no-untyped-def]
    for name in ("A100-80GB", "H100-80GB", "B200"):
        link = Link(300e9, 5e-6, nvlink=nvlink_curve(name))
        by_size = [[operation(1 << k, n, link) for k in range(10, 32)] for n in (2, 3, 4, 6, 8, 16)]
        assert all(own == sorted(own) for own in by_size)
        # Of large buffers eight GPUs may take less than six: a switch adds for them (tables).
        assert all([*own] == sorted(own) for own in [*zip(*by_size, strict=True)][:6])


def test_groups_are_as_slow_as_the_one_with_the_least_bandwidth() -> None:
    slow = replace(NVLINK, bytes_per_s=80e9, nvlink=replace(CURVE, large_call_s=1e-3))
    assert worst_link([NVLINK, slow]).nvlink == slow.nvlink
    assert worst_link([NVLINK, LINK]).nvlink is None


def test_ends_gather_and_scatter_with_sequence_parallelism() -> None:
    loss_s = 3 * all_reduce_s(4000, 4, LINK)
    assert end_exchanges(1e9, 4, LINK, False, 1000) == (all_reduce_s(1e9, 4, LINK), loss_s)
    found = end_exchanges(1e9, 4, LINK, True, 1000)
    assert found == (reduce_scatter_s(1e9, 4, LINK), all_gather_s(1e9, 4, LINK) + loss_s)


def test_keys_and_values_are_messages_in_a_ring_and_collectives_where_gathered() -> None:
    gathered = context_parallel_times(1e6, 8, NVLINK, is_ring=False)
    assert gathered == (all_gather_s(1e6, 8, NVLINK), reduce_scatter_s(1e6, 8, NVLINK))
    forward_s, _ = context_parallel_times(1e6, 8, NVLINK, is_ring=True)
    assert forward_s == ring_all_gather_s(1e6, 8, NVLINK)


@pytest.mark.parametrize("gpu", sorted({point.gpu for point in points("NVLink")}))
def test_prices_are_those_of_the_tables(gpu: str) -> None:
    """The shipped constants, of the bandwidth that the card's table has: 8 % in the mean."""
    own: list[Point] = [point for point in points("NVLink") if point.gpu == gpu]
    curve = nvlink_curve(gpu)
    assert curve is not None
    errors = [point.error_of(curve) for point in own]
    assert statistics.mean(map(abs, errors)) <= 0.08
    assert abs(statistics.median(errors)) <= 0.05
