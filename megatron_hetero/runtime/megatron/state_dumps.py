"""`save_grads`: dumps of gradients, weights and activations, written by one copy of the model.

Megatron writes what `--save-wgrads-interval` and its kind ask for on the first data-parallel rank,
to a file of that place in a pipeline.  On a plan every rank is the first of its data-parallel
group, and replicas would write to each other's files.  Three modules have the function under their
own names.
"""

from __future__ import annotations

from typing import Any

from megatron_hetero.runtime.megatron.guarded import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

_KNOWN = {"a9117026ac86c121": TESTED}
_WHY = "replicas of a plan would write to the same files"
_OF_WEIGHTS = Replacement("megatron.training.training", "save_grads", _WHY, _KNOWN)
_OF_ACTIVATIONS = Replacement("megatron.training.activation_logging", "save_grads", _WHY, _KNOWN)
_OF_INPUTS = Replacement("megatron.training.dgrad_logging", "save_grads", _WHY, _KNOWN)


def apply(copy: int) -> None:
    """Let copy 0 of the model write, and no other."""
    for replacement in (_OF_WEIGHTS, _OF_ACTIVATIONS, _OF_INPUTS):
        original = replacement.original()

        def save_grads(*args: Any, save: Any = original, **kwargs: Any) -> None:
            if copy == 0:
                save(*args, **kwargs)

        replacement.apply(save_grads)
