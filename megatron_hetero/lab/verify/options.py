"""Options of a verification: steps, optimizers, precision and a planted error."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.model.training import Precision

LEARNING_RATE = {"sgd": 3e-2, "adam": 3e-4}
OPTIMIZERS = tuple(LEARNING_RATE)
HALF_PRECISION_EPSILON = 1e-2
"""Epsilon of Adam, above the rounding of half precision. Below it an update is the sign of a
gradient that may be nothing but rounding."""


@dataclass(frozen=True)
class Options:
    """Options of a verification.

    `optimizers` train one after the other; `fault` names an error of `faults` that is planted in
    the plan's runs. `plan_flags` are Megatron flags of the plan's runs only. `precision` is that of
    all runs but those of `fp32_optimizers`. `reuses` takes what one process has trained in the same
    folder, for the same job, as it is. `resumes_after`: step after which the plan's processes save
    and end, and others load and go on, with Adam; 0 for none. `limit_s`: seconds after which a run
    has failed.
    """

    steps: int = 5
    optimizers: tuple[str, ...] = OPTIMIZERS
    floor: bool = False
    fault: str | None = None
    plan_flags: tuple[str, ...] = ()
    reuses: bool = False
    resumes_after: int = 0
    precision: Precision = "fp32"
    fp32_optimizers: tuple[str, ...] = ()
    limit_s: float = 900.0

    def resumes(self, optimizer: str) -> bool:
        """Tell if the plan's run with `optimizer` has a checkpoint between its steps; Megatron
        cannot load the state of SGD."""
        return self.resumes_after > 0 and optimizer == "adam"

    def precision_of(self, optimizer: str) -> Precision:
        """Return the precision of the runs with `optimizer`, but for stages with their own."""
        return "fp32" if optimizer in self.fp32_optimizers else self.precision


def precision_flags(precision: Precision) -> tuple[str, ...]:
    """Return Megatron's flag for training in `precision`."""
    return () if precision == "fp32" else (f"--{precision}",)


def loss_scale_flags(per_token_loss: bool) -> tuple[str, ...]:
    """Return flags of a loss scale for fp16 that grows within a few steps.

    It starts where the small model's gradients are far from both ends of fp16: a loss per token is
    a sum over the batch, otherwise a mean.
    """
    scale = 2**4 if per_token_loss else 2**12
    return (f"--initial-loss-scale={scale}", "--loss-scale-window=2", "--hysteresis=1")
