"""Jobs whose objective depends on the sequences in a micro-batch."""

from __future__ import annotations

from functools import lru_cache

from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.spec import Workload

_BALANCED = "aux_loss"
"""Megatron's `--moe-router-load-balancing-type` that balances experts within a micro-batch by a
loss."""
_SHARED_OUT = "sinkhorn"
"""The one that balances them within a micro-batch by the choice itself."""


@lru_cache(maxsize=64)
def size_changes_objective(workload: Workload) -> bool:
    """Return whether another micro-batch size trains towards something else: experts are balanced
    within a micro-batch, with a coefficient above zero; or losses are masked, and Megatron takes
    the mean of each micro-batch (no `--calculate-per-token-loss`)."""
    given = {o.name: o.values for o in last_of_each(flag_table().split(workload.megatron_args))}
    if "--eod-mask-loss" in given and not workload.training.per_token_loss:
        return True
    kinds = given.get("--moe-router-load-balancing-type", (_BALANCED,))
    coefficients = given.get("--moe-aux-loss-coeff", ())
    if not workload.model.num_experts:
        return False
    has_loss = any(float(value) > 0 for value in coefficients)
    return _SHARED_OUT in kinds or (_BALANCED in kinds and has_loss)
