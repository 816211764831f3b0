"""`router.sinkhorn`: experts shared out evenly over the tokens of a whole micro-batch.

Under sequence parallelism each rank of a tensor-parallel group routes its part of the tokens, and
Megatron balances each part by itself (`TopKRouter.sinkhorn_load_balancing`).  Another width then
chooses other experts.  Here the ranks gather their scores, apply Megatron's own function to all of
them, and keep their rows, so that a group of any width chooses what one process does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement
from megatron_hetero.runtime.megatron.token_dropping import gathered

REPLACEMENT = Replacement(
    module="megatron.core.transformer.moe.router",
    name="sinkhorn",
    reason="sinkhorn shares experts out over the tokens of a whole micro-batch",
    known={"330cf822d5ead8b3": TESTED},
)


def apply(group: dist.ProcessGroup) -> None:
    """Balance the tokens of a tensor-parallel group together from now on."""

    def balance(cost: torch.Tensor, *settings: float) -> torch.Tensor:
        """Return the balanced scores `[tokens, experts]` of this rank."""
        # Megatron balances without gradients as well.
        whole: torch.Tensor = REPLACEMENT.original()(gathered(cost.detach(), group), *settings)
        return whole.chunk(group.size())[group.rank()]

    REPLACEMENT.apply(balance)
