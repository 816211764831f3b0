"""Heads in the place of tokens, over gloo: each member has its own, and back again everything."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.parallel.fused_rows import positions_of
from megatron_hetero.runtime.sequences.head_exchange import HeadDomain, to_heads, to_tokens
from megatron_hetero.runtime.sequences.own_batch import own_batch
from megatron_hetero.sequences.step_tokens import GroupTokens
from tests.runtime.sequences.test_own_batch import GROUP, shares
from tests.runtime.toy_model import in_world

HEADS, GROUPS, CHANNELS = 12, 6, 2


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.sampled_from([(2,), (1, 2), (2, 1), (2, 2), (3,), (1, 1, 2)]),
    st.integers(0, 99),
)
def test_a_domain_has_its_own_tokens_and_all_keys(
    lengths: list[int], widths: tuple[int, ...], seed: int
) -> None:
    drawn, members = random.Random(seed), sum(widths)
    starts = numpy.r_[0, numpy.cumsum(lengths)]
    documents = [numpy.arange(a, b) for a, b in pairwise(starts)]
    tokens = tuple(shares(length, members, drawn) for length in lengths)
    group = GroupTokens(0, tuple(range(len(lengths))), tokens, 1.0, widths)
    batches = [own_batch(group, r, documents, GROUP) for r in range(members)]
    own = [batch.tokens[0, : batch.sequences.edges[-1]] for batch in batches]
    everywhere = torch.cat(own)
    for batch in batches:
        heads: Any = batch.sequences.heads
        here = torch.cat([own[m] for m in heads.domain])
        assert heads.counts == tuple(map(len, own)) and len(heads.domain) in widths
        for q, document in enumerate(documents):
            assert everywhere[batch.sequences.orders[q]].tolist() == document.tolist()
            assert torch.equal(here[heads.rows[q]], positions_of(heads.runs[q]) + int(starts[q]))
        rows = torch.cat(heads.rows)
        assert sorted(rows.tolist()) == list(range(len(here)))


def test_heads_stay_together_with_their_query_group() -> None:
    group = GroupTokens(0, (0,), ((1, 2, 0, 1),), 1.0, (1, 3))
    heads: Any = own_batch(group, 3, [numpy.arange(4)], GROUP).sequences.heads
    assert [heads.heads_of(m, 6) for m in range(4)] == [
        slice(0, 6), slice(0, 2), slice(2, 4), slice(4, 6),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="3 ranks exchange heads, and 4 query groups"):
        heads.heads_of(1, 4)


def whole(num_tokens: int, heads: int, seed: int) -> torch.Tensor:
    """Of all tokens of the group, member by member: shape `[tokens, 1, heads, d]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, 1, heads, CHANNELS, generator=generator)


def test_a_member_gets_its_heads_and_gives_the_result_back(tmp_path: Path) -> None:
    """In one domain, in unlike ones and in none, with a member that has no token."""
    cases = ((3, 1, 2), (3,)), ((3, 1, 2), (1, 2)), ((0, 4, 1), (2, 1)), ((2, 2, 2), (1, 1, 1))

    def check(rank: int) -> None:
        for counts, widths in cases:
            assert_exchanged(rank, counts, widths)

    in_world("tp1:1 @1 | tp1:1 @1 | tp1:1 @1", check, tmp_path)


def assert_exchanged(rank: int, counts: tuple[int, ...], widths: tuple[int, ...]) -> None:
    """Compare values and gradients: queries are of the domain's tokens, keys of the group's.

    Args:
        rank: the member.
        counts: tokens of every member.
        widths: of the domains.
    """
    edges = [sum(counts[:m]) for m in range(4)]
    positions = [[numpy.arange(edges[m], edges[m + 1]) for m in range(3)]]
    heads = HeadDomain.of(rank, widths, counts, positions)
    mine = slice(edges[rank], edges[rank + 1])
    all_of = [whole(sum(counts), n, seed) for seed, n in enumerate((HEADS, GROUPS, GROUPS))]
    own = [tensor[mine].clone().requires_grad_() for tensor in all_of]
    queries, keys, values = to_heads(*own, heads, dist.group.WORLD)
    domain = slice(edges[heads.domain.start], edges[heads.domain.stop])
    assert torch.equal(queries, all_of[0][domain, :, heads.heads_of(rank, HEADS)])
    assert torch.equal(keys, all_of[1][:, :, heads.heads_of(rank, GROUPS)])
    assert torch.equal(values, all_of[2][:, :, heads.heads_of(rank, GROUPS)])
    # What stands in the place of attention leaves the queries as they are.
    back = to_tokens(queries.flatten(2), heads, dist.group.WORLD)
    assert torch.equal(back, own[0].flatten(2))
    (back.sum() + (keys * (rank + 1)).sum() + values.sum()).backward()
    # Of each head one member of every domain has the keys of all.
    factors = torch.zeros(GROUPS)
    for member in range(3):
        factors[heads.heads_of(member, GROUPS)] += member + 1
    expected = torch.ones_like(own[1]) * factors[:, None]
    assert torch.equal(own[0].grad, torch.ones_like(own[0]))
    assert torch.equal(own[1].grad, expected)
    assert torch.equal(own[2].grad, torch.full_like(own[2], len(widths)))
