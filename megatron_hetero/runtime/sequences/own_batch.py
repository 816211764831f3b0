"""What one rank has of the sequences of its group: a micro-batch, and where its tokens lie.

The sequences follow one another.  Of each a member has two chunks, one from the front and one, as
far from the end, from the back (`plan.sharding.token_shares.chunk_edges`).
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
from megatron_hetero.runtime.sequences.documents import Tokens
from megatron_hetero.sequences.step_tokens import GroupTokens

_Places = npt.NDArray[np.int64]


@dataclass
class DividedSequences(PackedSeqParams):
    """A rank's part of sequences that its group `cp_group` divides, as Megatron carries it to
    attention and rotary positions.

    Attributes:
        positions: shape [own tokens], of each in its sequence.
        edges: own tokens `edges[q]` to `edges[q + 1] - 1` are of sequence q.
        orders: of each sequence, for each position, its place in the pieces of all members, each
            filled up to `most_tokens`.
        most_tokens: of the member that has most.
    """

    positions: Any = None
    edges: tuple[int, ...] = (0,)
    orders: tuple[Tensor, ...] = ()
    most_tokens: int = 0


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
    """
    places = [_places(tokens) for tokens in group.tokens]
    own = [of[rank - group.first] for of in places]
    tokens = [doc[at] for doc, at in zip(documents, own, strict=True)]
    labels = [_following(doc, at) for doc, at in zip(documents, own, strict=True)]
    counts = [at + 1 < len(doc) for doc, at in zip(documents, own, strict=True)]
    if uncounted is not None:
        counts = [c & (t != uncounted) for c, t in zip(counts, tokens, strict=True)]
    starts = np.zeros(group.size, dtype=np.int64)
    most = max(sum(of) for of in zip(*group.tokens, strict=True))
    orders = []
    for of in places:
        order = np.empty(sum(map(len, of)), dtype=np.int64)
        for member, at in enumerate(of):
            order[at] = member * most + starts[member] + np.arange(len(at))
            starts[member] += len(at)
        orders.append(_on_device(order))
    positions = _on_device(np.concatenate(own))
    longest = max(map(len, documents))
    return OwnBatch(
        _on_device(np.concatenate(tokens).astype(np.int64)).unsqueeze(0),
        _on_device(np.concatenate(labels).astype(np.int64)).unsqueeze(0),
        _on_device(np.concatenate(counts).astype(np.float32)).unsqueeze(0),
        positions.unsqueeze(0),
        DividedSequences(
            # Angles of rotary positions come token by token, so Megatron need not know the edges.
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cp_group=process_group,
            positions=positions,
            edges=tuple(int(e) for e in np.r_[0, np.cumsum([len(at) for at in own])]),
            orders=tuple(orders),
            most_tokens=most,
        ),
    )


def empty_batch(rank: int, alone: Any) -> OwnBatch:
    """Return the micro-batch of a rank that has no sequence in a step: one sequence without tokens,
    which gives every weight a gradient of zero, as overlapped exchanges expect one.

    Args:
        rank: the rank.
        alone: its process group.
    """
    nothing = np.zeros(0, dtype=np.int64)
    return own_batch(GroupTokens(rank, (0,), ((0,),), 0.0), rank, [nothing], alone)


def _places(tokens: Sequence[int]) -> list[_Places]:
    """Return the positions of each member's tokens in a sequence."""
    return [
        np.concatenate([np.arange(*front), np.arange(*back)]).astype(np.int64)
        for front, back in chunk_edges(tokens)
    ]


def _following(document: Tokens, places: _Places) -> Tokens:
    """Return the token after each place; after the last one any, which does not count."""
    return document[np.minimum(places + 1, len(document) - 1)] if len(places) else document[:0]


def _on_device(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(torch.cuda.current_device(), non_blocking=True)
