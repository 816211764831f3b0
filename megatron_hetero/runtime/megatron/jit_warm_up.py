"""`megatron.training.training.set_jit_fusion_options`: a warm-up at a size that no rank has.

Megatron warms its small fused kernels up with `ffn_hidden_size // width` columns, which has to be
even for a gated MLP.  A width that does not divide the columns, with shares, can make it odd; what
the layers really get is even always.  Nothing but the warm-up reads the size, so it gets another.
"""

from __future__ import annotations

from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="set_jit_fusion_options",
    reason="shares may leave an odd number of columns for each rank",
    known={"fe3ec3dcf2af9e1b": TESTED},
)


def _set_jit_fusion_options(*args: Any, **kwargs: Any) -> None:
    from megatron.training import get_args

    given = get_args()
    columns = given.ffn_hidden_size
    # Columns of each rank, rounded up to a whole and then to an even number.
    per_rank = -(-columns // given.tensor_model_parallel_size)
    given.ffn_hidden_size = (per_rank + per_rank % 2) * given.tensor_model_parallel_size
    try:
        REPLACEMENT.original()(*args, **kwargs)
    finally:
        given.ffn_hidden_size = columns


def apply() -> None:
    """Replace the symbol in this process."""
    REPLACEMENT.apply(_set_jit_fusion_options)
