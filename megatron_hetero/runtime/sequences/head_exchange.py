"""Heads in the place of tokens, and back: the all-to-alls around attention (Ulysses, arXiv
2309.14509), inside domains of a group; keys and values go to the whole group.

A group is divided into domains of members that follow each other.  In a domain of w members each
gets one w-th of the heads, query groups whole, with the queries of all tokens of its domain and the
keys and values of all tokens of the group, in one message from each member.  Shares of tokens may
be unlike, domains of unlike width.  With a domain for each member that is a gather, which a
collective of its own does better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.parallel.fused_rows import Run, runs_of


@dataclass(frozen=True)
class HeadDomain:
    """A member's domain, for one micro-batch.

    Attributes:
        member: its number in the group.
        counts: tokens of every member.
        places: of every member, its place in its domain, and the width of that.
        domain: the members of its own domain.
        rows: of each sequence, those of its domain's tokens that are of it, member by member.
        runs: of each sequence, where these tokens are in it, as runs of consecutive positions.
    """

    member: int
    counts: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    domain: range
    rows: tuple[Tensor, ...]
    runs: tuple[tuple[Run, ...], ...]

    @staticmethod
    def of(
        member: int,
        widths: Sequence[int],
        counts: Sequence[int],
        positions: Sequence[Sequence[npt.NDArray[np.int64]]],
        device: Any = "cpu",
    ) -> HeadDomain:
        """Find a member's domain.

        Args:
            member: its number in the group.
            widths: of the domains, in the order of the members.
            counts: tokens of every member.
            positions: [sequence][member], of its tokens in the sequence.
            device: of the tensors.
        """
        # Domains lie one after the other; a member's domain starts its place before it.
        places = tuple((place, width) for width in widths for place in range(width))
        place, width = places[member]
        domain = range(member - place, member - place + width)
        # Where each member's tokens of a sequence lie, once the domain's tokens are together.
        own = [counts[m] for m in domain]
        starts = [0, *accumulate(own)][:-1]
        rows, runs = [], []
        for of in positions:
            parts = []
            for number, m in enumerate(domain):
                parts.append(starts[number] + np.arange(len(of[m])))
                starts[number] += len(of[m])
            rows.append(torch.from_numpy(np.concatenate(parts)).to(device))
            runs.append(runs_of(np.concatenate([of[m] for m in domain])))
        return HeadDomain(member, tuple(counts), places, domain, tuple(rows), tuple(runs))

    def heads_of(self, member: int, num_heads: int) -> slice:
        """Return the heads, or query groups, of a member, of as many as this rank has.

        Raises:
            UsageError: the domain's members cannot have equally many.
        """
        place, width = self.places[member]
        if num_heads % width:
            raise UsageError(
                f"{width} ranks exchange heads, and {num_heads} query groups do not divide by "
                "that; let fewer ranks exchange them, and gather between these"
            )
        each = num_heads // width
        return slice(place * each, (place + 1) * each)


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, heads: HeadDomain, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange a rank's tokens for its part of the heads.

    Args:
        query: of the rank's own tokens, shape `[s_r, 1, heads, d]`.
        key, value: the same, of query groups.
        heads: the rank's domain.
        group: the process group.
    Returns:
        Queries of the domain's tokens and keys and values of the group's, member by member, shapes
        `[tokens, 1, own heads, d]`.
    """
    # To each member: keys and values of its heads, and queries if it is in the domain.
    both = torch.cat([key, value], dim=-1)
    parts, sent = [], []
    for m in range(len(heads.counts)):
        groups = heads.heads_of(m, key.size(2))
        pieces = [both[:, :, groups].reshape(-1)]
        if m in heads.domain:
            pieces.append(query[:, :, heads.heads_of(m, query.size(2))].reshape(-1))
        parts += pieces
        sent.append(sum(piece.numel() for piece in pieces))
    # What arrives: this member's heads of everybody's tokens.
    _, width = heads.places[heads.member]
    own_query = query.size(2) // width, query.size(3)
    own_both = key.size(2) // width, both.size(3)
    sizes = []
    for m, count in enumerate(heads.counts):
        sizes.append(count * own_both[0] * own_both[1])
        sizes.append(count * own_query[0] * own_query[1] if m in heads.domain else 0)
    # One all-to-all for both.
    received = all_to_all(
        group,
        torch.cat(parts),
        [a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)],
        sent,
    )
    # Take keys and values, and queries, apart again.
    pieces = received.split(sizes)
    both = torch.cat(pieces[::2]).view(-1, 1, *own_both)
    key, value = both.split([key.size(-1), value.size(-1)], dim=-1)
    return torch.cat(pieces[1::2]).view(-1, 1, *own_query), key, value


def to_tokens(context: Tensor, heads: HeadDomain, group: Any) -> Tensor:
    """Exchange attention's result for a part of the heads back for that of the rank's own tokens.

    Args:
        context: of the domain's tokens, member by member, shape `[tokens, 1, own heads * d]`.
        heads: the rank's domain.
        group: the process group.
    Returns:
        Shape `[s_r, 1, heads * d]`.
    """
    size, own, width = context.size(-1), heads.counts[heads.member], len(heads.domain)
    # Only members of one domain exchange: each gets its own tokens of the others' heads.
    sent = [n * size if m in heads.domain else 0 for m, n in enumerate(heads.counts)]
    received = [own * size if m in heads.domain else 0 for m in range(len(heads.counts))]
    # [member of the domain, own tokens, 1, the member's heads * d].
    pieces = all_to_all(group, context.reshape(-1), received, sent).view(width, own, 1, size)
    return torch.cat(list(pieces), dim=-1)
