"""`megatron.training.training.training_log`: lets observers see each step's raw loss and norm.

The printed line of the second iteration is the mean of the first two (Megatron resets its
accumulators only from then on), and prints seven digits; comparing runs needs the numbers
themselves, and tokens per second are not printed at all.  The loop offers no callback.  Megatron's
own logging runs unchanged after the observers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="training_log",
    reason="an observer needs the raw loss and gradient norm of each step",
    known={"5e34a182d566e325": TESTED},
    is_stock=True,
)


Observer = Callable[[int, dict[str, Any], Any], None]
"""`observe(iteration, loss_dict, grad_norm)`, called on every rank after every optimizer step."""

_observers: list[Observer] = []


def add_observer(observe: Observer) -> None:
    """Call `observe` from now on, after the observers that are there already."""
    _observers.append(observe)
    REPLACEMENT.apply(_training_log)


def _training_log(
    loss_dict: dict[str, Any],
    total_loss_dict: dict[str, Any],
    learning_rate: float | None,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Observers see the losses of the step before Megatron adds them up.
    for observe in _observers:
        observe(iteration, loss_dict, grad_norm)
    return REPLACEMENT.original()(
        loss_dict,
        total_loss_dict,
        learning_rate,
        iteration,
        loss_scale,
        report_memory_flag,
        skipped_iter,
        grad_norm,
        *args,
        **kwargs,
    )
