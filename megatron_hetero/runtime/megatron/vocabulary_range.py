"""`VocabUtility.vocab_range_from_per_partition_vocab_size`: vocabulary rows by shares.

The vocabulary-parallel embedding and cross entropy (fused or not) ask this one function which rows
a rank holds, and it answers that all ranks hold equally many.  Nothing passes a table to it, hence
the replacement; the layers themselves stay Megatron's.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.tensor_parallel.utils",
    name="VocabUtility.vocab_range_from_per_partition_vocab_size",
    reason="vocabulary rows divide by the shares of the plan",
    known={"4886aabbdb5005ac": TESTED},
)


def apply(rows: Sequence[int]) -> None:
    """Assign rows `rows[i] .. rows[i + 1] - 1` to rank i of the own tensor-parallel group."""

    def vocab_range(per_partition_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        if world_size != len(rows) - 1:
            raise CheckFailedError(
                f"Megatron asks for the vocabulary rows of a group of {world_size}; this stage's "
                f"has {len(rows) - 1}."
            )
        first, last = rows[rank], rows[rank + 1]
        if per_partition_vocab_size != last - first:
            raise CheckFailedError(
                f"tensor rank {rank} has {per_partition_vocab_size} rows of the vocabulary; by the "
                f"plan's shares it holds {last - first}."
            )
        return first, last

    REPLACEMENT.apply(vocab_range)
