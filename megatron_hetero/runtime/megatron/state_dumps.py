"""`save_grads`: dumps of gradients, weights and activations, written by one copy of the model.

Megatron writes what `--save-wgrads-interval` and its kind ask for on the first data-parallel rank,
to a file of that place in a pipeline.  On a plan every rank is the first of its data-parallel
group, and replicas would write to each other's files.  Three modules have the function under their
own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

_KNOWN = {"a9117026ac86c121": TESTED}
_WHY = "replicas of a plan would write to the same files"
_OF_WEIGHTS = Replacement("megatron.training.training", "save_grads", _WHY, _KNOWN)
_OF_ACTIVATIONS = Replacement("megatron.training.activation_logging", "save_grads", _WHY, _KNOWN)
_OF_INPUTS = Replacement("megatron.training.dgrad_logging", "save_grads", _WHY, _KNOWN)


def apply(copy: int, weight: float) -> None:
    """Let copy 0 of the model write, and no other.

    Args:
        copy: number of this rank's copy.
        weight: of its gradients in those of the job.  The gradients of inputs are written as its
            own passes have them; those of weights are the job's by then.
    """

    def writer(save: Callable[..., None], factor: float) -> Callable[..., None]:
        def save_grads(save_dir: str, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            if copy == 0:
                save(save_dir, _scaled(state, factor), *args, **kwargs)

        return save_grads

    for replacement in (_OF_WEIGHTS, _OF_ACTIVATIONS):
        replacement.apply(writer(replacement.original(), 1.0))
    # Gradients of inputs are those of this copy alone: the weight makes them a part of the job's.
    _OF_INPUTS.apply(writer(_OF_INPUTS.original(), weight))


def _scaled(state: Mapping[str, Mapping[str, Any]], factor: float) -> Mapping[str, Any]:
    if factor == 1.0:
        return state
    return {
        chunk: {name: tensor * factor for name, tensor in tensors.items()}
        for chunk, tensors in state.items()
    }
