"""Check of the user's own layers (`--spec`) for marks of tensor parallelism.

A parameter's place in the whole model is read off Megatron's marks. Layers of Megatron, torch and
Transformer Engine carry them or are copies by their kind. A parameter of another module without a
mark would be taken for a copy; if it were a shard, its gradient would be summed with strangers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

from megatron_hetero.errors import UnsupportedError

_KNOWN = ("megatron.", "megatron_hetero.", "torch.", "transformer_engine.", "apex.")


OFFSET = ".core_attention.softmax_offset"
"""Learnable offset of each head (`--softmax-type learnable`), divided by the layer without a mark.
"""


def mark_offsets(model: Iterable[torch.nn.Module]) -> None:
    """Mark the parameters that Megatron divides by heads without saying so."""
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if name.endswith(OFFSET) and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def check_marked(model: Iterable[torch.nn.Module], width: int) -> None:
    """Refuse unmarked parameters of unknown modules in a tensor-parallel group of `width`.

    Raises:
        UnsupportedError: the message names them, and the mark to set.
    """
    if width == 1:
        return
    found = [name for chunk in model for name in _unmarked(chunk)]
    if found:
        raise UnsupportedError(
            "--spec: these parameters do not say whether tensor parallelism divides them:\n  "
            + "\n  ".join(found)
            + "\nSet parameter.tensor_model_parallel = False on a copy; on a shard, call "
            "megatron.core.tensor_parallel.set_tensor_model_parallel_attributes."
        )


def _unmarked(chunk: torch.nn.Module) -> Iterator[str]:
    for prefix, module in chunk.named_modules():
        # Modules of these packages carry marks, or are copies.
        if type(module).__module__.startswith(_KNOWN):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if not hasattr(parameter, "tensor_model_parallel"):
                yield f"{prefix}.{name} of {type(module).__name__}"
