"""Errors planted on purpose: a check that cannot fail proves nothing.

Each one breaks a single thing in the runtime of the calling process, the way a real defect would,
and must make `verify` fail.  `broken_exchange` has those between ranks, `broken_training` those of
a rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.verify import broken_exchange, broken_training


def plant(name: str) -> None:
    """Break the runtime in this process, before training starts."""
    FAULTS[name]()


def check_fault(name: str) -> None:
    """Refuse a name that is not in `FAULTS`.

    Raises:
        UsageError: there is no such error to plant.
    """
    if name not in FAULTS:
        raise UsageError(f"--plant {name}: choose one of {', '.join(FAULTS)}")


FAULTS: dict[str, Callable[[], None]] = {
    "boundary-slice-dropped": broken_exchange.drop_boundary_slice,
    "boundary-halves-swapped": broken_exchange.swap_boundary_halves,
    "boundary-rounded": broken_exchange.round_boundary,
    "slice-not-reduced": broken_exchange.skip_slice,
    "bucket-not-reduced": broken_exchange.skip_bucket,
    "tied-embedding-not-reduced": broken_exchange.skip_tied_embedding,
    "weighted-by-micro-batch": broken_exchange.weight_by_micro_batch,
    "replica-weighs-more": broken_exchange.weigh_a_replica_more,
    "weights-not-gathered": broken_exchange.keep_old_weights,
    "shard-counted-twice": broken_training.count_shard_twice,
    "clip-forgotten": broken_training.forget_the_clip,
    "sample-moved": broken_training.move_sample,
    "micro-batch-twice": broken_training.read_micro_batch_twice,
    "samples-shifted": broken_training.shift_samples,
    "mask-ignored": broken_training.count_masked_tokens,
    "random-number-drawn-alone": broken_training.draw_alone,
    "unequal-starts": broken_training.start_apart,
    "learns-faster-alone": broken_training.learn_faster_on_one_rank,
}
"""`weights-not-gathered` needs `--use-distributed-optimizer`."""
