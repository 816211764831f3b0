"""A rank's place among the context-parallel ranks of its stage: which tokens are its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.plan.sharding.token_shares import chunk_edges
from megatron_hetero.runtime.parallel.fused_rows import Run

_ATTRIBUTE = "hetero_context_place"


@dataclass(frozen=True)
class ContextPlace:
    """Rank `rank` of as many context-parallel ranks as there are `tokens`, those of each.

    Example: 8 tokens on 2 ranks are 0, 1, 6, 7 on rank 0 and 2, 3, 4, 5 on rank 1, as in Megatron;
    by the shares (3, 1) they are 0, 1, 2, 5, 6, 7 and 3, 4.
    """

    tokens: tuple[int, ...]
    rank: int

    @property
    def seq_length(self) -> int:
        """Return the tokens of the whole sequence."""
        return sum(self.tokens)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return this rank's positions as runs: its two chunks, which are one where they meet."""
        (first, stop), (second, end) = chunk_edges(self.tokens)[self.rank]
        chunks = [(first, end)] if stop == second else [(first, stop), (second, end)]
        return tuple([(start, end - start) for start, end in chunks if start < end])

    def positions(self, device: Any = None) -> Tensor:
        """Return the positions of this rank's tokens in the sequence."""
        return self._positions_of(self.rank, device)

    def _positions_of(self, rank: int, device: Any) -> Tensor:
        chunks = chunk_edges(self.tokens)[rank]
        return torch.cat([torch.arange(*chunk, device=device) for chunk in chunks])

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the rank that has most: pieces are as long where they are
        gathered."""
        return max(self.tokens)

    def order_of_gathered(self, device: Any = None) -> Tensor:
        """Return, for each position, its index in the pieces of all ranks, each filled up to
        `most_tokens`."""
        # Positions rank by rank, and their places in the gathered pieces: sort these by those.
        ranks = range(len(self.tokens))
        positions = torch.cat([self._positions_of(rank, device) for rank in ranks])
        indices = torch.cat(
            [
                torch.arange(self.tokens[rank], device=device) + rank * self.most_tokens
                for rank in ranks
            ]
        )
        return indices[torch.argsort(positions)]


def set_context_place(config: Any, place: ContextPlace) -> None:
    """Store a rank's place in a stage with unlike shares of sequences on the model's configuration,
    for `context_place`."""
    setattr(config, _ATTRIBUTE, place)


def context_place(config: Any, num_own: int, group: Any) -> ContextPlace:
    """Return the place of this rank.

    Args:
        config: the model's.
        num_own: tokens that it has, which are as many on each rank but for unlike shares.
        group: the context-parallel group.
    """
    place: ContextPlace | None = getattr(config, _ATTRIBUTE, None)
    return place or ContextPlace((num_own,) * group.size(), group.rank())
