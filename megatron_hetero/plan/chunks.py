"""The chain of model chunks of a replica: which stage holds which piece of the model, in order."""

from __future__ import annotations

from megatron_hetero.plan.plan import Replica


def chain(replica: Replica) -> tuple[int, ...]:
    """[virtual stage] -> stage, in the order of the layers; one chunk on each stage is 0, 1, ..."""
    return tuple(range(len(replica.stages)))
