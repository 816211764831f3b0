"""`megatron.core.dist_checkpointing.save`: data in a folder of another name, until they are whole.

Megatron writes into the folder that loading reads.  It has steps that follow a save
(`AsyncRequest.finalize_fns`), but none of them may fail, and no hook for the folder's name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.dist_checkpointing",
    name="save",
    reason="a checkpoint must have its name only when it is whole",
    known={"e9626ecdf679a001": TESTED},
    is_stock=True,
)
_FINALIZE = Replacement(
    module="megatron.core.dist_checkpointing.strategies.state_dict_saver",
    name="save_state_dict_async_finalize",
    reason="ranks wait there for rank 0, which can meet a full disk",
    known={"e833e30e9e4f946b": TESTED},
    is_stock=True,
)


def apply(save: Callable[..., Any]) -> None:
    """Checkpoints' data are saved through `save(original, ...)` from now on.

    What Megatron does when the data are written is called, not replaced, but `save` knows it by
    heart, so its source is checked as well.
    """
    # `saving._Save` follows what this function does, step by step.
    _FINALIZE.check()
    original = REPLACEMENT.original()
    REPLACEMENT.apply(wraps(original)(partial(save, original)))
