"""`router.apply_router_token_dropping`: the capacity of experts over a whole micro-batch.

Under sequence parallelism each rank of a tensor-parallel group routes its part of the tokens, and
Megatron gives every expert a capacity on each rank by itself.  Another width then drops other
tokens.  Here the ranks gather their choices, apply Megatron's own function to all of them, and keep
their rows, so that a group of any width drops what one process does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.transformer.moe.router",
    name="apply_router_token_dropping",
    reason="the capacity of an expert counts the tokens of a whole micro-batch",
    known={"215cbb6df959d635": TESTED},
)


def apply(group: dist.ProcessGroup) -> None:
    """Drop the tokens of a tensor-parallel group together from now on."""

    def drop(
        routing_probs: torch.Tensor, routing_map: torch.Tensor, **settings: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the probabilities and choices `[tokens, experts]` of this rank that are kept."""
        # All ranks of the group decide on the same tokens, and so alike.
        _, kept = REPLACEMENT.original()(
            gathered(routing_probs.detach(), group),
            gathered(routing_map.to(torch.uint8), group).bool(),
            **settings,
        )
        own = kept.chunk(group.size())[group.rank()]
        # The probabilities keep their gradients: detached copies decided, and nothing else.
        return routing_probs * own, own

    REPLACEMENT.apply(drop)


def gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the equally many rows of all ranks of `group`."""
    whole = part.new_empty((group.size() * len(part), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole
