"""Attention inside divided sequences is plain causal attention of each, gradients too."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_hetero.runtime.megatron import parallel_state
from megatron_hetero.runtime.sequences.attention import DividedAttention
from megatron_hetero.runtime.sequences.own_batch import own_batch
from megatron_hetero.sequences.step_tokens import GroupTokens
from tests.runtime.toy_model import ToyRank, in_world
from tests.runtime.workloads import plan

HEADS, GROUPS, CHANNELS = 12, 6, 2
LENGTHS = (7, 1, 4)
SHARES = ((3, 4, 0), (0, 1, 0), (1, 0, 3))
"""[sequence][member]: one has nothing of the first, of the second only one has something."""
WORLD = "tp1:4 @1 | tp1:4 @1 | tp1:4 @1"


def whole(seed: int, heads: int) -> torch.Tensor:
    """Of all tokens: shape `[tokens, 1, heads, d]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), 1, heads, CHANNELS, generator=generator, dtype=torch.float64)


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Causal attention of each sequence by itself, whole.

    Args:
        query, key, value: of all tokens.
        offset: shape `[heads]`, a further score of every query, of a key without a value.
    """
    found = []
    for own in zip(*[x.split(LENGTHS) for x in (query, key, value)], strict=True):
        q, k, v = (x[:, 0].transpose(0, 1) for x in own)
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / CHANNELS**0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        further = offset.view(-1, 1, 1).expand(-1, scores.size(1), 1)
        weights = torch.cat([scores, further], dim=-1).softmax(-1)[..., :-1]
        found.append((weights @ v).transpose(0, 1).flatten(1)[:, None])
    return torch.cat(found)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
def test_it_is_that_of_whole_sequences(is_fused: bool, tmp_path: Path) -> None:
    """Gathered, or with heads exchanged in domains; with filling tokens behind too; by torch's
    kernels, or with offsets of the softmax, which these do not have."""

    def check(rank: int) -> None:
        toy = ToyRank(plan(WORLD), rank, False, overlap=False)
        parallel_state.fill(toy.groups)
        model_parallel_cuda_manual_seed(1)  # which dropout asks for in any case
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HEADS * CHANNELS,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            softmax_type="vanilla" if is_fused else "learnable",
        )
        attention = DividedAttention(config, 1, AttnMaskType.causal, "self")
        offset = torch.full((HEADS,), float("-inf"), dtype=torch.float64)
        if not is_fused:
            offset = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
            attention.softmax_offset = torch.nn.Parameter(offset)
        for domains, multiple in (((), 1), ((), 3), ((3,), 2), ((1, 2), 1)):
            assert_equal_to_plain(attention, offset, rank, domains, multiple)

    in_world(WORLD, check, tmp_path)


def assert_equal_to_plain(
    attention: DividedAttention,
    offset: torch.Tensor,
    rank: int,
    domains: tuple[int, ...],
    multiple: int,
) -> None:
    """Compare a rank's own rows and gradients with those of whole sequences.

    Args:
        attention: of the rank.
        offset: as in `plain`.
        rank: the rank.
        domains: in which heads are exchanged; none to gather keys.
        multiple: of which the rank's tokens are one.
    """
    starts = numpy.cumsum([0, *LENGTHS])
    numbers = [numpy.arange(a, a + n) for a, n in zip(starts, LENGTHS, strict=False)]
    group = GroupTokens(0, (0, 1, 2), SHARES, 1.0, domains)
    batch = own_batch(group, rank, numbers, dist.group.WORLD, multiple=multiple)
    mine, count = batch.tokens[0], batch.sequences.edges[-1]
    leaves = [whole(s, n).requires_grad_() for s, n in enumerate((HEADS, GROUPS, GROUPS))]
    expected = plain(*leaves, offset)
    slope = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * slope).sum().backward()
    own = [x.detach()[mine].requires_grad_() for x in leaves]
    found = attention(*own, None, packed_seq_params=batch.sequences)
    assert found.shape == (len(mine), 1, HEADS * CHANNELS)
    bound = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(found[:count], expected.detach()[mine[:count]], **bound)
    (found[:count] * slope[mine[:count]]).sum().backward()
    for part, leaf in zip(own, leaves, strict=True):
        assert part.grad is not None and leaf.grad is not None
        torch.testing.assert_close(part.grad[:count], leaf.grad[mine[:count]], **bound)
