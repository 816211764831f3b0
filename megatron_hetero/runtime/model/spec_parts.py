"""Parts of Megatron's layer specs, replaced wherever they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

type LayerSpec = ModuleSpec | TransformerBlockSubmodules
"""The spec of every layer; or, as Megatron has it for experts, of the stage's layers."""


def with_parts(spec: LayerSpec, parts: Mapping[Any, Any]) -> LayerSpec:
    """Replace modules in a spec, at any depth.

    Args:
        spec: of one layer or of a stage's.
        parts: Megatron's module -> what stands in its place.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [_with_parts(layer, parts) for layer in spec.layer_specs or ()]
        return replace(spec, layer_specs=layers)
    return _with_parts(spec, parts)


def _with_parts(layer: ModuleSpec, parts: Mapping[Any, Any]) -> ModuleSpec:
    changes: dict[str, Any] = {}
    if isinstance(layer.module, type) and layer.module in parts:
        changes["module"] = parts[layer.module]
    if layer.submodules is not None:
        found: dict[str, Any] = {}
        # A part stands in a spec as a class, as a spec of its own, or as a builder.
        for name, value in vars(layer.submodules).items():
            if isinstance(value, type) and value in parts:
                found[name] = parts[value]
            elif isinstance(value, ModuleSpec):
                found[name] = _with_parts(value, parts)
            elif isinstance(value, partial) and value.func in parts:
                # Megatron's builder of a module: the class with some of its arguments.
                found[name] = partial(parts[value.func], *value.args, **value.keywords)
        changes["submodules"] = replace(layer.submodules, **found)
    return replace(layer, **changes) if changes else layer
