"""What each member of a tensor-parallel group holds and computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cost.share import (
    TensorShare,
    even_share,
    even_share_or_none,
    largest_fraction,
    least_shares,
    member_shares,
)
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.model.spec import ModelSpec
from tests.cost.builders import make_workload

DENSE = make_workload().model  # 8 heads, 2048 columns
EXPERTS = make_workload(
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=256,
    moe_shared_expert_intermediate_size=512,
).model
MIXED = replace(EXPERTS, moe_layer_freq=(0, 1, 1, 1))


def groups(widths: int = 8) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 5), min_size=1, max_size=widths).map(tuple)


@given(groups(), st.sampled_from([DENSE, EXPERTS, MIXED]))
def test_members_hold_the_whole_once(shares: tuple[int, ...], model: ModelSpec) -> None:
    members = member_shares(model, len(shares), shares)
    assert len(members) == len(shares)
    assert sum(m.query_groups for m in members) == model.num_query_groups
    assert sum(m.mlp_columns for m in members) == model.mlp_columns
    assert sum(m.shared_columns for m in members) == model.moe_shared_expert_intermediate_size
    assert sum(m.dense_columns for m in members) == model.dense_columns
    assert min(m.query_groups for m in members) >= 1
    for one, more in pairwise(members):
        if one.shares and one.shares[one.index] < one.shares[more.index]:
            assert one.mlp_columns <= more.mlp_columns


@given(groups(4), st.integers(1, 3))
def test_rows_of_the_vocabulary_add_up(shares: tuple[int, ...], thousands: int) -> None:
    rows, width = 1024 * thousands, len(shares)
    members = member_shares(DENSE, width, shares)
    if members[0].shares is None:
        assert {m.rows_as_if_even(DENSE, rows) for m in members} == {rows}
    else:
        assert sum(m.rows_as_if_even(DENSE, rows) for m in members) == rows * width


def test_shares_by_hand() -> None:
    """3 to 1 of 8 heads are 6 and 2, of 2048 columns 1536 and 512."""
    large, small = member_shares(DENSE, 2, (3, 1))
    assert (large.query_groups, large.mlp_columns) == (6, 1536)
    assert (small.query_groups, small.mlp_columns) == (2, 512)
    assert (large.rows_as_if_even(DENSE, 1024), small.rows_as_if_even(DENSE, 1024)) == (1536, 512)
    assert (large.index, small.index) == (0, 1)


def test_equal_shares_are_no_shares_where_the_width_divides() -> None:
    assert member_shares(DENSE, 4, (2, 2, 2, 2)) == member_shares(DENSE, 4)
    assert member_shares(DENSE, 4)[0].shares is None
    assert member_shares(DENSE, 3, (1, 1, 1))[0].shares == (1, 1, 1)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_an_even_share_is_a_part_of_all(width: int) -> None:
    share = even_share(DENSE, width)
    assert (share.query_groups, share.mlp_columns) == (8 // width, 2048 // width)
    assert share == TensorShare(width, 8 // width, 2048 // width)
    assert even_share_or_none(DENSE, width) == share


@pytest.mark.parametrize("width", [3, 5, 6, 7])
def test_a_width_that_does_not_divide_needs_shares(width: int) -> None:
    assert even_share_or_none(DENSE, width) is None
    with pytest.raises(PlanFormatError, match="do not divide"):
        even_share(DENSE, width)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_least_shares_are_those_of_a_group_as_equal_as_can_be(width: int) -> None:
    found = least_shares(DENSE, width)
    heads = [share.query_groups for share in found]
    columns = [share.mlp_columns for share in found]
    assert max(heads) == -(-8 // width) and min(heads) == 8 // width
    # Without a width that divides them, columns go in blocks of 16.
    block = 16 if 8 % width else 1
    assert max(columns) == -(-2048 // (width * block)) * block
    assert max(columns) - min(columns) <= block
    assert found[0].query_groups == max(heads)
    assert len(set(found)) == len(found)
    assert all(share.shares is None and share.index == 0 for share in found)


def test_a_width_that_divides_heads_but_not_columns_has_none() -> None:
    assert even_share_or_none(replace(DENSE, ffn_hidden_size=2049), 2) is None
    assert even_share_or_none(replace(EXPERTS, moe_shared_expert_intermediate_size=511), 2) is None


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tokens_are_divided_by_context_and_by_sequence_parallelism(
    context: int, sequence_parallel: bool
) -> None:
    training = make_workload(micro_batch_size=2, sequence_parallel=sequence_parallel).training
    for share in member_shares(DENSE, 2, None, context):
        assert share.num_tokens(DENSE, training) == 2 * 256 // context
        own = 2 * 256 // context // (2 if sequence_parallel else 1)
        assert share.own_tokens(DENSE, training) == own
    assert len(member_shares(DENSE, 2, None, context)) == 2 * context


def test_whole_experts_by_hand() -> None:
    """Of 8 experts 5 on one member and 3 on the other; all else in halves."""
    many, few = member_shares(EXPERTS, 2, None, 1, (5, 3))
    assert (many.experts, few.experts) == (5, 3)
    assert many.mlp_columns == few.mlp_columns == 256  # an expert is whole
    assert many.query_groups == few.query_groups == 4
    assert many.shared_columns == few.shared_columns == 256
    assert (many.num_experts(EXPERTS), few.num_experts(EXPERTS)) == (5, 3)
    assert even_share(EXPERTS, 2).num_experts(EXPERTS) == 8  # a part of each


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple), st.integers(1, 2))
def test_whole_experts_add_up_in_each_context_rank(shares: tuple[int, ...], context: int) -> None:
    model = replace(EXPERTS, num_query_groups=12, num_attention_heads=12, moe_ffn_hidden_size=240)
    model = replace(model, moe_shared_expert_intermediate_size=480)
    width = len(shares)
    members = member_shares(model, width, None, context, shares)
    assert len(members) == width * context
    for rank in range(context):
        own = members[rank * width : (rank + 1) * width]
        assert sum(m.experts for m in own) == 8
        assert min(m.experts for m in own) >= 1


def test_a_share_in_layers_of_unlike_kinds() -> None:
    share = even_share(MIXED, 2)
    assert share.dense_columns == 1024
    sparse, dense = share.of_kind(0), share.of_kind(1)
    assert (sparse.mlp_columns, sparse.shared_columns, sparse.dense_columns) == (128, 256, 0)
    assert (dense.mlp_columns, dense.shared_columns, dense.dense_columns) == (1024, 0, 0)
    (dealt, _) = member_shares(MIXED, 2, None, 1, (5, 3))
    assert dealt.of_kind(0).experts == 5 and dealt.of_kind(1).experts == 0


@given(groups(6))
def test_the_largest_fraction_is_that_of_the_fullest_member(shares: tuple[int, ...]) -> None:
    members = member_shares(DENSE, len(shares), shares)
    expected = max(max(m.query_groups / 8, m.mlp_columns / 2048) for m in members)
    assert largest_fraction(DENSE, members) == pytest.approx(expected)
    assert 1 / len(shares) <= largest_fraction(DENSE, members) <= 1


def test_the_largest_fraction_of_whole_experts() -> None:
    assert largest_fraction(EXPERTS, member_shares(EXPERTS, 2, None, 1, (5, 3))) == 5 / 8
    assert largest_fraction(EXPERTS, member_shares(EXPERTS, 2)) == 0.5
    assert largest_fraction(EXPERTS, member_shares(EXPERTS, 2, (3, 1))) == 0.75
