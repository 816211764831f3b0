"""`core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication`, in two parts.

Zero-bubble schedules need the two parts of a backward pass at different times.  Megatron's local
linear layers make both in one autograd function, and its own flag for the second one
(`--delay-wgrad-compute`) is for Transformer Engine's layers alone.  The function is replaced by a
subclass of it that does what Megatron's does, unless weight gradients are being put off just then.
Only plans whose orders have split backward passes apply it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.tensor_parallel.layers",
    name="LinearWithGradAccumulationAndAsyncCommunication",
    reason="zero-bubble schedules make weight gradients later",
    known={"9ffc0bd1a94437d4": TESTED},
)

Split = Callable[[Any, Any], tuple[Any, ...] | None]
"""`split(ctx, output_gradient)` -> gradients of the function's inputs, or None to leave the
backward pass to Megatron."""


def apply(split: Split) -> None:
    """Ask `split` first in the backward pass of linear layers from now on."""
    original: Any = REPLACEMENT.original()

    class Linear(original):  # type: ignore[misc]
        """Megatron's function, with a backward pass that may stop after the first part."""

        @staticmethod
        def backward(ctx: Any, output_gradient: Any) -> Any:
            # None: no weight gradients are being put off, and Megatron's pass runs whole.
            gradients = split(ctx, output_gradient)
            return original.backward(ctx, output_gradient) if gradients is None else gradients

    REPLACEMENT.apply(Linear)
