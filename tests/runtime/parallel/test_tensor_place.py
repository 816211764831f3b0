"""Uneven shares: the sizes from which a rank builds its model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.plan import StageShape
from megatron_hetero.runtime.parallel.tensor_place import TensorPlace


def arguments(
    heads: int = 16, groups: int | None = 8, ffn: int = 128, vocab: int = 64
) -> SimpleNamespace:
    return SimpleNamespace(
        num_attention_heads=heads,
        group_query_attention=groups is not None,
        num_query_groups=groups or 1,
        ffn_hidden_size=ffn,
        padded_vocab_size=vocab,
        make_vocab_size_divisible_by=8,
        num_experts=None,
    )


def place(shares: tuple[int, ...] | None, index: int, args: SimpleNamespace) -> TensorPlace:
    width = 4 if shares is None else len(shares)
    return TensorPlace.of_stage(StageShape(width, 4, shares), index, args)


def test_a_quarter_of_the_virtual_model_is_the_ranks_own_share() -> None:
    args = arguments()
    with place((3, 2, 2, 1), 0, args).own_sizes(args):
        assert vars(args) == vars(arguments(heads=24, groups=12, ffn=192, vocab=96))
    with place((3, 2, 2, 1), 3, args).own_sizes(args):
        assert vars(args) == vars(arguments(heads=8, groups=4, ffn=64, vocab=32))
    assert vars(args) == vars(arguments())


def test_without_grouped_queries_heads_are_the_units() -> None:
    args = arguments(groups=None)
    with place((3, 1), 0, args).own_sizes(args):
        assert (args.num_attention_heads, args.num_query_groups) == (24, 1)


@pytest.mark.parametrize("shares", [None, (1, 1, 1, 1)])
def test_equal_shares_change_nothing(shares: tuple[int, ...] | None) -> None:
    args = arguments()
    even = place(shares, 1, args)
    assert even.is_even
    with even.own_sizes(args):
        assert vars(args) == vars(arguments())


def test_a_width_that_divides_nothing() -> None:
    """10 heads at width 3, as 4:3:3."""
    args = arguments(heads=10, groups=None, ffn=40)
    own = []
    for index in range(3):
        with place((4, 3, 3), index, args).own_sizes(args):
            own.append((args.num_attention_heads // 3, args.ffn_hidden_size // 3))
    assert own == [(4, 16), (3, 12), (3, 12)]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_the_ranks_together_are_the_model(shares: list[int]) -> None:
    width = len(shares)
    heads, columns = 0, 0
    for index in range(width):
        args = arguments(heads=48, groups=12, ffn=100)
        with place(tuple(shares), index, args).own_sizes(args):
            heads += args.num_attention_heads // width
            columns += args.ffn_hidden_size // width
    assert (heads, columns) == (48, 100)


def test_more_ranks_than_units() -> None:
    with pytest.raises(PlanFormatError, match="2 units"):
        place((2, 1, 1), 0, arguments(heads=8, groups=2))
