"""Rows of causal attention by fused kernels, beside the plain softmax of masked scores."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.runtime.parallel import fused_rows
from megatron_hetero.runtime.parallel.fused_rows import attend, runs_of


def plain(query, key, value, positions, scale):
    """Attention as it is written down, in fp64."""
    query, key, value = (part.double() for part in (query, key, value))
    times = query.size(2) // key.size(2)
    key, value = (part.repeat_interleave(times, dim=2) for part in (key, value))
    scores = scale * torch.einsum("qbhd,kbhd->bhqk", query, key)
    later = torch.arange(len(key)) > torch.from_numpy(positions).unsqueeze(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", shares, value).flatten(2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_and_gradients_are_those_of_plain_attention(data: st.DataObject) -> None:
    tokens, groups = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 3))
    heads, width = groups * data.draw(st.integers(1, 3)), data.draw(st.sampled_from([4, 8]))
    own = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, unique=True))
    if data.draw(st.booleans()):
        own = sorted(own)
    positions = np.array(own)
    torch.manual_seed(data.draw(st.integers(0, 9)))
    batch = data.draw(st.integers(1, 2))
    query = torch.randn(len(own), batch, heads, width, requires_grad=True)
    key = torch.randn(tokens, batch, groups, width, requires_grad=True)
    value = torch.randn(tokens, batch, groups, width, requires_grad=True)
    weight = torch.randn(len(own), batch, heads * width)
    # On GPUs without flash attention, each query of a group is a call of its own.
    knows_groups = data.draw(st.booleans())
    with patch.object(fused_rows, "_num_calls", lambda *_: 1 if knows_groups else heads // groups):
        found = attend(query, key, value, runs_of(positions), 0.3)
    wanted = plain(query, key, value, positions, 0.3)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    given_back = torch.autograd.grad((found * weight).sum(), (query, key, value))
    by_hand = torch.autograd.grad((wanted * weight).sum(), (query, key, value))
    for one, other in zip(given_back, by_hand, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


@given(st.lists(st.integers(0, 50)))
def test_runs_are_the_positions(positions: list[int]) -> None:
    runs = runs_of(np.array(positions, dtype=np.int64))
    assert [p for first, count in runs for p in range(first, first + count)] == positions
    for (first, count), (after, _) in pairwise(runs):
        assert after != first + count  # no run could be longer


@pytest.mark.parametrize("rows", [2048])
def test_no_scores_are_stored(rows: int) -> None:
    """What autograd keeps grows with the rows, not with their square."""
    query, key, value = (torch.randn(rows, 1, 2, 16, requires_grad=True) for _ in range(3))
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(query, key, value, ((0, rows),), 0.25)
    assert sum(kept) < 8 * query.nbytes < rows * rows * 4
