"""The flags of a case of stock Megatron outside its grid of ranks."""

from __future__ import annotations

from typing import Literal

from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.share import TensorShare, member_shares
from megatron_hetero.hashed import hashed_once, value
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TokenDispatcher

StockRecompute = Literal["as needed", "none", "selective", "full"]
"""`as needed`: as few layers by blocks as fit, the same number on every stage."""


@hashed_once
@value(frozen=True)
class StockSettings:
    """The flags of a case outside the grid."""

    micro_batch_size: int
    recompute: StockRecompute
    num_chunks: int = 1
    expert_groups: tuple[int, int] | None = None
    """As of `StageShape`; None divides every expert in its tensor-parallel group."""
    dispatcher: TokenDispatcher = "allgather"

    @property
    def least_recompute(self) -> Recompute:
        """Return the recompute before any layer gets more because memory asks for it."""
        return "none" if self.recompute == "as needed" else self.recompute

    @property
    def least_chunks(self) -> int:
        """The fewest chunks of a stage: none and all are for several, as `as needed` has both for
        stages in one piece."""
        return 1 if self.recompute in ("as needed", "selective") else 2

    def share(self, model: ModelSpec, width: int, context_parallel: int) -> TensorShare | None:
        """Return the contents of each GPU of a group, or None for a plain equal part."""
        if context_parallel == 1 and self.expert_groups is None:
            return None
        groups = self.expert_groups
        return member_shares(model, width, None, context_parallel, None, None, groups)[0]
