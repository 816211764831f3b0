"""Bias of experts (`--moe-router-enable-expert-bias`) from the tokens of the whole job.

Megatron counts the tokens of each expert over data-parallel groups, which a plan of unlike stages
does not have.  Here each rank puts the counts of its layers into the rows of a table of all layers,
the job sums it, and Megatron's own rule moves the bias: every holder of a layer gets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_config, unwrap_model


def expert_bias_hook(model: list[Any]) -> list[Any]:
    """Let the end of a step move the bias of experts: a `post_wrap_hook`, after the sync's."""
    config = get_model_config(model[0])
    if config.moe_router_enable_expert_bias:
        config.finalize_model_grads_func = _with_bias(config.finalize_model_grads_func)
    return model


def _with_bias(finalize: Callable[..., None]) -> Callable[..., None]:
    def finalized(model: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        update_expert_bias(model)

    return finalized


def update_expert_bias(model: Sequence[Any]) -> None:
    """Move every router's bias by the tokens of the step, and begin to count anew.  Collective."""
    config = get_model_config(model[0])
    routers = dict(_routers(model, config.num_layers))
    shape = (config.num_layers + (config.mtp_num_layers or 0), config.num_moe_experts)
    device = next(model[0].parameters()).device
    # [layer, expert]; layers of other ranks stay 0 here.
    tokens, bias = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    for layer, router in routers.items():
        tokens[layer] = router.local_tokens_per_expert
        bias[layer] = router.expert_bias
    moved = get_updated_expert_bias(
        tokens, bias, config.moe_router_bias_update_rate, tp_dp_cp_group=dist.group.WORLD
    )
    for layer, router in routers.items():
        router.expert_bias.copy_(moved[layer])
    # Megatron counts the next step's tokens from 0.
    reset_model_temporary_tensors(config, list(model))


def _routers(model: Sequence[Any], num_layers: int) -> Iterator[tuple[int, TopKRouter]]:
    """Yield (layer, router); layers that predict further tokens follow the others."""
    for chunk in unwrap_model(list(model)):
        for name, module in chunk.named_modules():
            if isinstance(module, TopKRouter):
                first = num_layers if name.startswith("mtp.") else 0
                yield first + module.layer_number - 1, module
