"""Layers of a user's own, as `--spec tests.runtime.own_layers without_a_norm` names them."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp


def without_a_norm(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's local layers, whose MLP reads what attention leaves."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.pre_mlp_layernorm = IdentityOp
    return spec
