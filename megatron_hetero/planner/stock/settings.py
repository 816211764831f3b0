"""The flags of a case of stock Megatron outside its grid of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_hetero.model.spec import TokenDispatcher

StockRecompute = Literal["as needed", "none", "selective", "full"]
"""`as needed`: as few layers by blocks as fit, the same number on every stage."""


@dataclass(frozen=True)
class StockSettings:
    """The flags of a case outside the grid."""

    micro_batch_size: int
    recompute: StockRecompute
    num_chunks: int = 1
    expert_groups: tuple[int, int] | None = None
    """As of `StageShape`; None divides every expert in its tensor-parallel group."""
    dispatcher: TokenDispatcher = "allgather"
