"""`megatron.training.training.load_checkpoint`: nothing is read that was not checked.

Megatron checks files only with `--verify-integrity`, on rank 0 alone, and goes on from no other
checkpoint where one is damaged.  The loop offers no hook before it loads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="load_checkpoint",
    reason="a damaged checkpoint must be refused, and the one before it found",
    known={"4f03d48a79382b8c": TESTED},
    is_stock=True,
)


def apply(load_checkpoint: Callable[..., Any]) -> None:
    """Megatron's loop loads through `load_checkpoint(original, ...)` from now on."""
    original = REPLACEMENT.original()
    REPLACEMENT.apply(wraps(original)(partial(load_checkpoint, original)))
