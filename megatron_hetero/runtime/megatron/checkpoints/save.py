"""`megatron.training.training.save_checkpoint`: a save that fails is not the job's end.

A full disk raises on the ranks that meet it, while others wait for them; Megatron has no hook
between the loop and the writing.  Megatron's own function runs inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="save_checkpoint",
    reason="a save that fails must not end the job or leave half a checkpoint",
    known={"b652984ca8c8309d": TESTED},
    is_stock=True,
)


def apply(save_checkpoint: Callable[..., Any]) -> None:
    """Megatron's loop saves through `save_checkpoint(original, ...)` from now on."""
    original = REPLACEMENT.original()
    REPLACEMENT.apply(wraps(original)(partial(save_checkpoint, original)))
