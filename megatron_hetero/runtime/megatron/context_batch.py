"""`_get_batch_on_this_cp_rank_per_sequence_balancing`: a rank's own tokens by unlike shares.

Megatron's scripts ask for a context-parallel rank's part of a micro-batch
(`get_batch_on_this_cp_rank`), and this function behind it cuts equal chunks.  A script imports the
former by its name, and nothing passes shares to it, hence the replacement.
"""

from __future__ import annotations

from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement
from megatron_hetero.runtime.parallel.context_place import ContextPlace

REPLACEMENT = Replacement(
    module="megatron.core.utils",
    name="_get_batch_on_this_cp_rank_per_sequence_balancing",
    reason="tokens of a sequence divide by the shares of the plan",
    known={"75cd4acd55a2e24b": TESTED},
)


def apply(place: ContextPlace) -> None:
    """Give this rank the tokens of `place`, of every tensor of a micro-batch that has tokens."""

    def own_tokens(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
        for key, value in batch.items():
            if value is not None:
                # A mask is [b, 1, s, s] and is cut by queries; all else is [b, s].
                sequence = 2 if key == "attention_mask" else 1
                batch[key] = value.index_select(sequence, place.positions(value.device))
        return batch

    REPLACEMENT.apply(own_tokens)
