"""`megatron.training.training.training_log`: lets an observer see each step's raw loss and norm.

The printed line of the second iteration is the mean of the first two (Megatron resets its
accumulators only from then on), and prints seven digits; comparing runs needs the numbers
themselves.  The loop offers no callback.  Only `verify` installs it; Megatron's own logging runs
unchanged after the observer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="training_log",
    reason="an observer needs the raw loss and gradient norm of each step",
    known={"5e34a182d566e325": "0.19.2"},
)


def apply(observe: Callable[[int, dict[str, Any], Any], None]) -> None:
    """Call `observe(iteration, loss_dict, grad_norm)` after every optimizer step."""

    def training_log(
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

    REPLACEMENT.apply(training_log)
