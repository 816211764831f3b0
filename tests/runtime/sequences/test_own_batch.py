"""What each rank has of a group's documents: together all tokens and all labels, once."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.runtime.sequences.own_batch import filling_batch, own_batch
from megatron_hetero.sequences.step_tokens import GroupTokens

GROUP: Any = SimpleNamespace()


def shares(length: int, members: int, drawn: random.Random) -> tuple[int, ...]:
    cuts = sorted(drawn.randint(0, length) for _ in range(members - 1))
    return tuple(b - a for a, b in pairwise([0, *cuts, length]))


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_members_together_have_every_token_once(
    lengths: list[int], members: int, multiple: int, seed: int
) -> None:
    drawn = random.Random(seed)
    starts = numpy.r_[0, numpy.cumsum(lengths)]
    documents = [numpy.arange(a, b) for a, b in pairwise(starts)]
    tokens = tuple(shares(length, members, drawn) for length in lengths)
    group = GroupTokens(5, tuple(range(len(lengths))), tokens, 1.0)
    batches = [
        own_batch(group, 5 + r, documents, GROUP, uncounted=int(starts[-1]) // 2, multiple=multiple)
        for r in range(members)
    ]
    counted, pieces = [], []
    for batch in batches:
        own = batch.sequences
        real = own.edges[-1]
        assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape
        assert batch.tokens.shape[1] == max(-(-real // multiple), 1) * multiple
        assert batch.tokens.shape[1] <= own.most_tokens and not batch.loss_mask[0, real:].any()
        counts = batch.loss_mask[0].bool()
        assert torch.equal(batch.labels[0][counts], batch.tokens[0][counts] + 1)
        counted += batch.tokens[0][counts].tolist()
        filled = torch.full((own.most_tokens,), -1)
        filled[:real] = batch.tokens[0, :real]
        pieces.append(filled)
        for q, start in enumerate(starts[:-1]):
            mine = slice(own.edges[q], own.edges[q + 1])
            assert torch.equal(own.positions[mine] + int(start), batch.tokens[0, mine])
    last = {int(end) - 1 for end in starts[1:]} | {int(starts[-1]) // 2}
    assert sorted(counted) == [t for t in range(int(starts[-1])) if t not in last]
    gathered = torch.cat(pieces)
    for batch in batches:
        for document, order in zip(documents, batch.sequences.orders, strict=True):
            assert gathered[order].tolist() == document.tolist()


def test_a_rank_without_a_sequence_has_tokens_that_do_not_count() -> None:
    assert filling_batch(GROUP).tokens.shape == (1, 1)
    batch = filling_batch(GROUP, multiple=3)
    assert batch.tokens.shape == (1, 3) and not batch.loss_mask.any()
    assert batch.sequences.edges == (0,) and batch.sequences.orders == ()
