"""A placement found under settings that are not the job's, written for the job."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cost.placement import Placement, Recompute
from megatron_hetero.model.spec import TrainingSpec

Settings = tuple[int, Recompute]
"""Micro-batch size and recompute."""


def with_settings(
    placement: Placement, training: TrainingSpec, size: int, recompute: Recompute
) -> Placement:
    """Return a placement found under the given settings as a placement of the job with its own
    settings.

    Args:
        training: the job's own settings, which the placement does not repeat.
        size: micro-batch size of every replica, in sequences.
        recompute: of every stage.
    """
    own_size = None if size == training.micro_batch_size else size
    own_recompute = None if recompute == training.recompute else recompute
    return Placement(
        tuple(
            replace(
                replica,
                micro_batch_size=own_size,
                stages=tuple(replace(stage, recompute=own_recompute) for stage in replica.stages),
            )
            for replica in placement.replicas
        )
    )
