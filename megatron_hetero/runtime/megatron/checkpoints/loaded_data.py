"""`megatron.core.dist_checkpointing.load`: state of other layers and of another Adam is translated.

Transformer Engine's layers and Megatron's local ones, and their optimizers, keep the same weights
and moments, but say the rest otherwise. Megatron reads each of the two with its own kind alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.dist_checkpointing",
    name="load",
    reason="a checkpoint of Transformer Engine's layers must load under local ones, and back",
    known={"40f333740e86ac38": TESTED},
    is_stock=True,
)


def apply(load: Callable[..., Any]) -> None:
    """Checkpoints' data are loaded through `load(original, ...)` from now on."""
    original = REPLACEMENT.original()
    REPLACEMENT.apply(wraps(original)(partial(load, original)))
