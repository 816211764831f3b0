"""Tokens of a sequence on context-parallel ranks with unlike shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.plan import StageShape
from megatron_hetero.plan.sharding.token_shares import chunk_edges, token_counts, uneven_tokens


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple), st.integers(1, 40))
def test_causal_work_is_divided_exactly_as_the_tokens(shares: tuple[int, ...], more: int) -> None:
    seq_length = 2 * (len(shares) + more)
    tokens = token_counts(seq_length, shares)
    found = [
        [i for first, stop in pair for i in range(first, stop)] for pair in chunk_edges(tokens)
    ]
    assert sorted(i for own in found for i in own) == list(range(seq_length))
    for own, number, share in zip(found, tokens, shares, strict=True):
        assert len(own) == number and number % 2 == 0
        # Query i meets i + 1 keys: with both chunks, half the sequence for each token.
        assert 2 * sum(i + 1 for i in own) == number * (seq_length + 1)
        wished = seq_length * share / sum(shares)
        assert number <= 2 or abs(number - wished) < 2 * len(shares)


def test_odd_numbers_of_tokens_differ_by_a_token() -> None:
    shares = (30, 11, 7, 0, 52)
    edges = chunk_edges(shares)
    tokens = [i for pair in edges for first, stop in pair for i in range(first, stop)]
    assert sorted(tokens) == list(range(100))
    for share, pair in zip(shares, edges, strict=True):
        own = [i for first, stop in pair for i in range(first, stop)]
        assert len(own) == share
        assert abs(sum(i + 0.5 for i in own) - share * 50) <= 100


def test_tensor_parallel_ranks_divide_their_tokens_where_they_can() -> None:
    assert token_counts(24, (2, 1), 4) == (16, 8)
    assert token_counts(30, (2, 1), 3) == (18, 12)
    # 28 is no multiple of 6, and 6 is too short for two groups of three.
    assert token_counts(28, (2, 1), 3) == (18, 10)
    assert token_counts(6, (5, 1), 3) == (4, 2)


def test_equal_shares_are_none() -> None:
    assert uneven_tokens(StageShape(2, 4, None, 2), 16) is None
    assert uneven_tokens(StageShape(2, 4, None, 2, context_shares=(5, 5)), 16) is None
    assert uneven_tokens(StageShape(2, 4, None, 2, context_shares=(3, 1)), 16) == (12, 4)


@pytest.mark.parametrize("seq_length", [7, 2])
def test_a_sequence_that_cannot_be_divided_is_refused(seq_length: int) -> None:
    with pytest.raises(PlanFormatError, match=f"a sequence of {seq_length} tokens cannot give"):
        token_counts(seq_length, (2, 1))
