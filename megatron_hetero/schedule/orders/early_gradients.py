"""Gradients that are exchanged within a stage's passes (`--overlap-grad-reduce`), as data.

Every rank starts its buckets in one order, deep layers first.  A bucket that waits for another
replica may hold up all that its GPU is given after it (one hardware queue), so a stage may start
buckets only where nobody needs what comes later to start an earlier bucket:

* With `--align-grad-reduce`, Megatron's default, only first stages start any within their passes,
  and only within the last pass, after which they send nothing.  The gradients of chunks that were
  done before wait for that pass: behind them the stage still has to send what other stages need
  for deeper layers.
* Without it every stage starts a chunk's gradients within the chunk's last pass.  Those of deeper
  layers are then under way on all stages, because a pass follows those of deeper layers.
* Where replicas wait for parts of each other's sharded layers (`Layout.has_idle_rounds`), none
  start within passes: a replica that is done gives its parts to the others, and a bucket before
  them would hold the parts up.

`schedule.proof` proves each plan anyway; the tests prove random ones for each number of buckets
that may find room.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hetero.schedule.programme import Operation, Schedule

_GRADIENTS = ("backward", "backward_weight")


def early_gradients(
    schedule: Schedule, stage: int, *, aligned: bool
) -> Mapping[Operation, tuple[int, ...]]:
    """Map operations of a stage to the chunks whose gradients may be exchanged from then on, the
    operation's own chunk as its pass completes them.

    Args:
        schedule: of the replica.
        stage: in it.
        aligned: `--align-grad-reduce`.
    """
    # The last backward pass of each chunk, in the order of the passes.
    last: dict[int, Operation] = {}
    for instruction in schedule.programmes[stage]:
        for operation in instruction:
            if operation.kind in _GRADIENTS:
                # A chunk moves to the end with each of its passes: the dict keeps the order of last
                # passes.
                last.pop(operation.chunk, None)
                last[operation.chunk] = operation
    # Unaligned: every chunk from its own last pass on.
    if not aligned:
        return {operation: (chunk,) for chunk, operation in last.items()}
    # Aligned: first stages alone, all chunks from the very last pass on.
    if stage:
        return {}
    *_, final = last.values()
    return {final: tuple(last)}
