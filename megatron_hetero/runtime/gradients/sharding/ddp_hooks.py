"""Hooks that keep sharded layers out of Megatron's DDP while it makes its gradient buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_hetero.plan.plan import Plan

_MARK = "hetero_is_sharded"


def sharded_numbers(plan: Plan) -> frozenset[int]:
    """Return the numbers of all sharded layers, from 0."""
    return frozenset(
        stage.first_layer + i
        for stage in plan.replicas[0].stages
        for i in range(stage.shape.num_sharded_layers)
    )


def layers_of(model: Sequence[torch.nn.Module]) -> Iterator[tuple[int, torch.nn.Module]]:
    """Yield the layers of a rank's chunks with their numbers in the model, from 0."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                yield module.layer_number - 1, module


def hide_sharded_hook(plan: Plan) -> Callable[[list[Any]], list[Any]]:
    """Return a `pre_wrap_hook` that keeps Megatron's DDP from making gradient buffers for sharded
    layers; `ShardedLayers` takes them over."""
    numbers = sharded_numbers(plan)

    def hook(model: list[Any]) -> list[Any]:
        for number, layer in layers_of(model):
            if number in numbers:
                for parameter in layer.parameters():
                    if parameter.requires_grad:
                        setattr(parameter, _MARK, True)
                        parameter.requires_grad_(False)
        return model

    return hook


def is_hidden(parameter: torch.nn.Parameter) -> bool:
    """Return whether `hide_sharded_hook` hid this parameter from DDP."""
    return bool(getattr(parameter, _MARK, False))


def show_sharded(model: list[Any]) -> list[Any]:
    """Undo `hide_sharded_hook` once DDP has wrapped the model: a `post_wrap_hook`."""
    for chunk in model:
        for parameter in chunk.parameters():
            if is_hidden(parameter):
                parameter.requires_grad_(True)
    return model
