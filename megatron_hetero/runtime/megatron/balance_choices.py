"""`router.compute_routing_scores_for_aux_loss`: lets an observer see, and decide, what is balanced.

A balancing loss counts the tokens of each expert by a choice of its own, the best scores without
bias and groups, and not by the choice that sends the tokens.  Megatron's `RouterReplay` replays the
latter alone.  The symbol is replaced in runs that `verify` watches, and in no others
(`lab.verify.processes.routing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.transformer.moe.router",
    name="compute_routing_scores_for_aux_loss",
    reason="choices of experts that a balancing loss counts are kept and replayed",
    known={"d183c63bf2fb7667": TESTED},
)

Observer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`observe(choices, scores)`, both `[tokens, experts]`, returns the choices that are counted."""


def apply(observe: Observer) -> None:
    """Count what `observe` returns from now on."""

    def choose(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return the choices and the scores `[tokens, experts]` of a balancing loss."""
        choices, scores = REPLACEMENT.original()(logits, *args, **kwargs)
        return observe(choices, scores), scores

    REPLACEMENT.apply(choose)
