"""Errors that are planted on purpose, by name: a check that cannot fail proves nothing.

Each one breaks a single thing in the runtime of the calling process, as a real defect would, and
must make `verify` fail. `between_ranks` has the errors between ranks, `within_rank` those of a
single rank's part.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.verify.faults import between_ranks, within_rank
from megatron_hetero.lab.verify.faults.features import FEATURE_FAULTS, IN_EVERY_RUN
from megatron_hetero.lab.verify.faults.newer import NEWER_FAULTS


def plant(name: str) -> None:
    """Insert an error into the runtime of this process, before training starts."""
    FAULTS[name]()


def plant_in_one_process(name: str | None) -> None:
    """Insert into the one process an error of code that it shares with the plan's ranks."""
    if name in IN_EVERY_RUN:
        FAULTS[name]()


def check_fault(name: str) -> None:
    """Refuse a name that is not in `FAULTS`.

    Raises:
        UsageError: there is no such error to plant.
    """
    if name not in FAULTS:
        raise UsageError(f"--plant {name}: choose one of {', '.join(FAULTS)}")


FAULTS: dict[str, Callable[[], None]] = {
    "boundary-slice-dropped": between_ranks.drop_boundary_slice,
    "boundary-halves-swapped": between_ranks.swap_boundary_halves,
    "boundary-rounded": between_ranks.round_boundary,
    "slice-not-reduced": between_ranks.skip_slice,
    "bucket-not-reduced": between_ranks.skip_bucket,
    "tied-embedding-not-reduced": between_ranks.skip_tied_embedding,
    "weighted-by-micro-batch": between_ranks.weight_by_micro_batch,
    "replica-weighs-more": between_ranks.weigh_a_replica_more,
    "weights-not-gathered": between_ranks.keep_old_weights,
    "shard-counted-twice": within_rank.count_shard_twice,
    "clip-forgotten": within_rank.forget_the_clip,
    "sample-moved": within_rank.move_sample,
    "micro-batch-twice": within_rank.read_micro_batch_twice,
    "samples-shifted": within_rank.shift_samples,
    "mask-ignored": within_rank.count_masked_tokens,
    "random-number-drawn-alone": within_rank.draw_alone,
    "unequal-starts": within_rank.start_apart,
    "learns-faster-alone": within_rank.learn_faster_on_one_rank,
    **FEATURE_FAULTS,
    **NEWER_FAULTS,
}
"""`weights-not-gathered` needs `--use-distributed-optimizer`."""
