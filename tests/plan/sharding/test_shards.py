"""Shard tables tile a tensor and follow the shares."""

from __future__ import annotations

import doctest
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.sharding import shards
from megatron_hetero.plan.sharding.shards import COLUMN_BLOCK, block_edges, common_cuts, shard_edges


def test_examples_of_the_docstrings() -> None:
    results = doctest.testmod(shards)
    assert results.attempted >= 5
    assert results.failed == 0


@given(st.integers(1, 16), st.integers(1, 50))
def test_equal_parts(width: int, units_each: int) -> None:
    edges = shard_edges(width * units_each, width)
    assert edges == tuple(i * units_each for i in range(width + 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 300))
def test_shares_tile_without_empty_part_and_near_their_quota(shares: list[int], extra: int) -> None:
    width, num_units = len(shares), len(shares) + extra
    edges = shard_edges(num_units, width, shares)
    parts = [b - a for a, b in pairwise(edges)]
    assert len(parts) == width
    assert (edges[0], edges[-1]) == (0, num_units)
    assert min(parts) >= 1
    quotas = [num_units * share / sum(shares) for share in shares]
    if min(quotas) >= 1:
        assert all(abs(part - quota) < 1 for part, quota in zip(parts, quotas, strict=True))


def test_remainders_go_to_the_largest_then_to_the_lowest_rank() -> None:
    assert shard_edges(10, 3, (1, 1, 1)) == (0, 4, 7, 10)
    assert shard_edges(7, 2, (5, 3)) == (0, 4, 7)  # quotas 4.375 and 2.625


@pytest.mark.parametrize(
    ("num_units", "width", "shares", "says"),
    [
        (10, 4, None, "10 units do not divide by 4 devices"),
        (3, 4, None, "3 units cannot give each of 4 devices one"),
        (3, 4, (1, 1, 1, 1), "3 units cannot give each of 4 devices one"),
        (8, 2, (1, 1, 1), "give 2 integers of at least 1"),
        (8, 2, (1, 0), "give 2 integers of at least 1"),
        (8, 0, None, "at least one device"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    num_units: int, width: int, shares: tuple[int, ...] | None, says: str
) -> None:
    with pytest.raises(PlanFormatError, match=says):
        shard_edges(num_units, width, shares)


def test_tables_of_different_tensors_do_not_mix() -> None:
    with pytest.raises(ValueError, match="different tensors"):
        common_cuts([(0, 4), (0, 5)])
    with pytest.raises(ValueError, match="different tensors"):
        common_cuts([])


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(*[st.integers(1, 20)] * n)))
def test_columns_in_unlike_shares_stay_in_blocks(shares: tuple[int, ...]) -> None:
    edges = block_edges(688 * COLUMN_BLOCK, COLUMN_BLOCK, len(shares), shares)
    assert not any(edge % COLUMN_BLOCK for edge in edges)
    parts = [stop - start for start, stop in pairwise(edges)]
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - 688 * COLUMN_BLOCK * share / sum(shares)) < COLUMN_BLOCK


def test_vocabulary_rows_divide_in_blocks_where_there_are_enough() -> None:
    assert block_edges(1024, 128, 3, (2, 1, 1)) == (0, 512, 768, 1024)
    assert block_edges(260, 128, 2, (3, 1)) == (0, 195, 260)
    assert block_edges(256, 128, 3, (1, 1, 1)) == (0, 86, 171, 256)
    assert block_edges(256, 128, 2) == (0, 128, 256)
