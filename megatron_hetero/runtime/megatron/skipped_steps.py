"""`training.dummy_train_step`: the data of a step that `--iterations-to-skip` leaves out.

Megatron reads as many micro-batches as the whole job has.  Replicas of a plan have numbers of their
own, so each would go on with other data than one process does.  Here each reads its own number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="dummy_train_step",
    reason="replicas read their own numbers of micro-batches",
    known={"91eb8be33790b4f1": TESTED},
)


def apply(counts: Mapping[int, int], *, reads_data: bool) -> None:
    """Skip steps so from now on.

    Args:
        counts: global batch, in sequences -> micro-batches of this rank's replica.
        reads_data: whether this rank reads any.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    def skip(data_iterator: Any) -> None:
        # Megatron counts a step in micro-batches of this rank's size.
        count = counts[get_num_microbatches() * get_args().micro_batch_size]
        rerun = get_rerun_state_machine()
        # Megatron's rerun machine counts this step as any other.
        while rerun.should_run_forward_backward(data_iterator):
            for _ in range(count if reads_data else 0):
                next(data_iterator)

    REPLACEMENT.apply(skip)
