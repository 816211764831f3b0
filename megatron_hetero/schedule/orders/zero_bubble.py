"""Zero bubble: weight gradients fill the time in which a stage would wait.

Qi et al. 2024 (arXiv 2401.10241): with the backward pass in two parts only its part for inputs is
on the way to the stage before; weight gradients can wait.  Where every stage may hold as much as
1F1B holds on its first, the bubble of equal stages falls from (P - 1)(F + B) to
(P - 1)(F + B - 2W) (ZB-H1, B the whole backward pass).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.schedule.orders.list_schedule import (
    Listed,
    Policy,
    TimedPipeline,
    list_schedule,
)

# All ways to prefer passes, with three degrees of waiting for a message.
POLICIES = tuple(
    Policy(split=True, alternate=alternate, patience=patience)
    for alternate in (True, False)
    for patience in (0.0, 0.5, 1.0)
)


def zero_bubble(pipeline: TimedPipeline, limits: Sequence[int] | None = None) -> Listed:
    """Make the quickest of the greedy zero-bubble schedules.

    Args:
        limits: micro-batches whose activations each stage may hold (activations are held until the
            weight gradients are done), shape [stage]; by default what 1F1B holds on the first.
    Raises:
        CheckFailedError: with these limits all stages wait for each other.
    """
    # What 1F1B holds on its first stage, on every stage.
    if limits is None:
        limits = [pipeline.num_stages] * pipeline.num_stages
    listed = [list_schedule(pipeline, limits, policy) for policy in POLICIES]
    return min(listed, key=lambda one: one.makespan_s)
