"""`core.dist_checkpointing.validation._validate_sharding_for_key`: pieces that lie in no grid.

Megatron's check of a tensor counts the cells of a grid of equal pieces, stops at an assertion where
they are not equal, and leaves out pieces outside of a grid.  Pieces in a grid stay its own to
check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.dist_checkpointing.validation",
    name="_validate_sharding_for_key",
    reason="pieces of unlike stages and shares lie in no grid",
    known={"177de43d1590fc7f": TESTED},
    is_stock=True,
)

Pieces = Sequence[tuple[int, Any]]
"""(rank, the rank's piece) of a tensor."""


def apply(is_a_grid: Callable[[Pieces], bool], faults_of: Callable[[Pieces], list[str]]) -> None:
    """Tensors of which not `is_a_grid` are checked by `faults_of` from now on."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    def validate(pieces: Pieces) -> list[Any]:
        # Megatron's own check counts the cells of a grid.
        if is_a_grid(pieces):
            return list(REPLACEMENT.original()(pieces))
        # Megatron gathers the errors of all tensors before it raises.
        return [CheckpointingException(fault) for fault in faults_of(pieces)]

    REPLACEMENT.apply(validate)
