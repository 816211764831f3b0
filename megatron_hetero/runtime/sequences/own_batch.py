"""A rank's part of the sequences of a group: a micro-batch, and the places of the tokens.

The sequences follow one another.  Of each a member has two chunks, one from the front and one, as
far from the end, from the back (`plan.sharding.token_shares.chunk_edges`).  Behind them a member
may have filling tokens, which do not count: Megatron's layers do not run on none, and sequence
parallelism divides them evenly among the ranks of a tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_hetero.plan.sharding.token_shares import chunk_edges
from megatron_hetero.runtime.parallel.fused_rows import Run, runs_of
from megatron_hetero.runtime.sequences.documents import Tokens
from megatron_hetero.runtime.sequences.head_exchange import HeadDomain
from megatron_hetero.sequences.step_tokens import GroupTokens

_Places = npt.NDArray[np.int64]


@dataclass
class DividedSequences(PackedSeqParams):
    """A rank's part of sequences divided by group `cp_group`, carried by Megatron to attention and
    rotary positions.

    Attributes:
        positions: shape [own tokens], of each in its sequence.
        edges: own tokens `edges[q]` to `edges[q + 1] - 1` are of sequence q; those behind the last
            edge are filling ones.
        runs: of each sequence, what its own tokens are as runs of consecutive positions.
        orders: of each sequence, for each position, its place in the pieces of all members; each
            is filled up to `most_tokens`, but not where heads are exchanged.
        most_tokens: of the member that has most.
        heads: where the group exchanges them.
    """

    positions: Any = None
    edges: tuple[int, ...] = (0,)
    runs: tuple[tuple[Run, ...], ...] = ()
    orders: tuple[Tensor, ...] = ()
    most_tokens: int = 0
    heads: HeadDomain | None = None


@dataclass(frozen=True)
class OwnBatch:
    """A rank's micro-batch; tensors have shape [1, own tokens]."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    sequences: DividedSequences


def own_batch(
    group: GroupTokens,
    rank: int,
    documents: Sequence[Tokens],
    process_group: Any,
    uncounted: int | None = None,
    device: Any = "cpu",
    multiple: int = 1,
) -> OwnBatch:
    """Take a rank's tokens of a group's documents.

    Every token but the first is a label once, of the one before it; a document's last token has
    none and does not count.

    Args:
        group: of the rank.
        rank: the rank.
        documents: of the group, each [tokens], in the order of its sequences.
        process_group: of the group.
        uncounted: a token whose successor does not count (`--eod-mask-loss`).
        device: of the tensors.
        multiple: of which each member's tokens are one, with filling ones.
    """
    # Places of each member's tokens in every sequence, and this rank's tokens, labels and counts.
    places = [_places(tokens) for tokens in group.tokens]
    own = [of[rank - group.first] for of in places]
    tokens = [doc[at] for doc, at in zip(documents, own, strict=True)]
    labels = [doc[_following(doc, at)] for doc, at in zip(documents, own, strict=True)]
    counts = [at + 1 < len(doc) for doc, at in zip(documents, own, strict=True)]
    if uncounted is not None:
        counts = [c & (t != uncounted) for c, t in zip(counts, tokens, strict=True)]
    # Members have unlike numbers of tokens; gathered pieces are filled up to the largest.
    sums = [sum(of) for of in zip(*group.tokens, strict=True)]
    most = max(count + _num_filling(count, multiple) for count in sums)
    heads = None
    starts = np.arange(group.size, dtype=np.int64) * most
    # Exchanged heads come without filling, one member behind the other.
    if group.domains:
        heads = HeadDomain.of(rank - group.first, group.domains, sums, places, device)
        starts = np.r_[0, np.cumsum(sums)[:-1]]
    # For each position of a sequence: where gathering puts its token.
    orders = []
    for of in places:
        order = np.empty(sum(map(len, of)), dtype=np.int64)
        for member, at in enumerate(of):
            order[at] = starts[member] + np.arange(len(at))
            starts[member] += len(at)
        orders.append(torch.from_numpy(order).to(device))
    # Edges of the sequences in this rank's tokens, and their runs of consecutive positions.
    edges = np.r_[0, np.cumsum([len(at) for at in own])]
    runs = tuple(map(runs_of, own))
    # Filling tokens at the end, which count for nothing.
    filling = np.zeros(_num_filling(int(edges[-1]), multiple), dtype=np.int64)
    own, tokens, labels, counts = ([*of, filling] for of in (own, tokens, labels, counts))
    return OwnBatch(
        _row(tokens, np.int64, device),
        _row(labels, np.int64, device),
        _row(counts, np.float32, device),
        _row(own, np.int64, device),
        _divided(process_group, _row(own, np.int64, device)[0], edges, runs, orders, most, heads),
    )


def filling_batch(alone: Any, device: Any = "cpu", multiple: int = 1) -> OwnBatch:
    """Return the micro-batch of a rank without sequences: filling tokens, to give every weight a
    gradient of zero for the overlapped exchanges.

    Args:
        alone: the process group of this rank.
        device: of the tensors.
        multiple: as in `own_batch`.
    """
    filling = [np.zeros(multiple, dtype=np.int64)]
    integers, nothing = _row(filling, np.int64, device), _row(filling, np.float32, device)
    sequences = _divided(alone, integers[0], filling[0][:1], (), [], multiple)
    return OwnBatch(integers, integers, nothing, integers, sequences)


def _divided(
    process_group: Any,
    positions: Tensor,
    edges: _Places,
    runs: tuple[tuple[Run, ...], ...],
    orders: Sequence[Tensor],
    most: int,
    heads: HeadDomain | None = None,
) -> DividedSequences:
    longest = max([1, *map(len, orders)])
    return DividedSequences(
        # Angles of rotary positions come token by token, so Megatron need not know the edges.
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=process_group,
        positions=positions,
        edges=tuple(int(e) for e in edges),
        runs=runs,
        orders=tuple(orders),
        most_tokens=most,
        heads=heads,
    )


def _num_filling(count: int, multiple: int) -> int:
    """Return the filling tokens behind `count` own ones."""
    return -count % multiple if count else multiple


def _places(tokens: Sequence[int]) -> list[_Places]:
    """Return the positions of each member's tokens in a sequence."""
    return [
        np.concatenate([np.arange(*front), np.arange(*back)]).astype(np.int64)
        for front, back in chunk_edges(tokens)
    ]


def _following(document: Tokens, places: _Places) -> _Places:
    """Return the place after each; the last one's is itself, which does not count."""
    return np.minimum(places + 1, len(document) - 1)


def _row(parts: Sequence[npt.NDArray[Any]], kind: Any, device: Any) -> Tensor:
    """Concatenate parts, shape [1, tokens]."""
    return torch.from_numpy(np.concatenate(parts).astype(kind)).to(device).unsqueeze(0)
