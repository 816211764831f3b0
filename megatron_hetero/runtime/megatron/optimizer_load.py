"""Stock's divided optimizer, loaded where neither Transformer Engine nor Apex is installed.

Megatron then trains with torch's Adam, whose state has a step for each parameter.  Four things go
wrong in a load: before the first step there is no state, and its description ends in an assertion;
weights in fp32 refuse to be written in place; all parameters share one tensor of their step, which
then counts once for each; and this step is wanted from, or overwritten by, what was not saved.
"""

from __future__ import annotations

from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

_MODULE = "megatron.core.optimizer.distrib_optimizer"

DESCRIBED = Replacement(
    module=_MODULE,
    name="DistributedOptimizer.state_dict",
    reason="torch's Adam has no state before its first step",
    known={"fe621ae6a622b587": TESTED},
    is_stock=True,
)
LOADED = Replacement(
    module=_MODULE,
    name="DistributedOptimizer._set_main_param_and_optimizer_states",
    reason="torch's Adam has a step for each parameter",
    known={"40cab784659711a8": TESTED},
    is_stock=True,
)


def apply_if_needed(args: Any) -> None:
    """Let stock's divided optimizer load into torch's Adam, if torch's Adam is in use.

    Args:
        args: Megatron's arguments.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE or not args.use_distributed_optimizer:
        return
    describe: Any = DESCRIBED.original()
    write: Any = LOADED.original()

    def state_dict(self: Any) -> Any:
        fill_states(self.optimizer, self.optimizer_state_keys)
        return describe(self)

    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # The step is saved with the groups, so Megatron must not look for one here.
        write(self, model_param, {**tensors, "step": None})
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        # A tensor of its own, or every parameter's update would count the shared one.
        state["step"] = state["step"].clone()

    DESCRIBED.apply(state_dict)
    LOADED.apply(set_states)


def fill_states(optimizer: Any, keys: tuple[str, ...]) -> None:
    """Give every parameter of a torch optimizer the state from before the first step.

    Args:
        optimizer: torch's; left alone if it has taken a step.
        keys: names of the tensors that its state has for each parameter.
    """
    import torch

    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                **{key: torch.zeros_like(parameter) for key in keys},
            }
