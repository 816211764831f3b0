"""`megatron.training.training.get_forward_backward_func`: a replica runs its own micro-batches.

Megatron's loop hands one number of micro-batches to whatever this function returns, and keeps every
account (samples, learning rate, global batch) by that number.  Both have to stay the whole job's,
while each replica runs only its part.  `train` takes no argument for the schedule, hence the
replacement; the schedules themselves stay Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="get_forward_backward_func",
    reason="micro-batch counts differ between replicas",
    known={"9d8e0a75be40fcce": TESTED},
)


def apply(forward_backward: Callable[..., Any]) -> None:
    """Run each step of Megatron's loop through `forward_backward` from now on."""

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return forward_backward

    REPLACEMENT.apply(get_forward_backward_func)
