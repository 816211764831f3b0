"""`check_param_hashes_across_dp_replicas`: equal weights on all holders, however they are cut.

Megatron compares whole parameters over data-parallel groups
(`--check-weight-hash-across-dp-replicas-interval`).  Replicas of a plan cut them unlike, so what is
compared is what they hold in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="check_param_hashes_across_dp_replicas",
    reason="replicas cut a parameter unlike",
    known={"34ef87f40b2d2e43": TESTED},
)


def apply(weights_are_equal: Callable[[Sequence[Any]], bool]) -> None:
    """Compare weights by `weights_are_equal(model chunks)`, a collective."""

    def check_param_hashes_across_dp_replicas(model: Any, cross_check: bool = False) -> bool:
        return weights_are_equal(model)

    REPLACEMENT.apply(check_param_hashes_across_dp_replicas)
