"""The optimizer's state as stock Megatron's distributed optimizer writes and reads it.

One of stock's forms has global shapes: `fully_reshardable`, that of
`--dist-ckpt-optim-fully-reshardable`.  Each tensor of state lies at the parameter's place, under
the key that an ordinary optimizer's has.  Only main weights have another key, and are there in fp32
too; and the number of steps is with the parameter groups.  The other forms, stock's default
`dp_reshardable` among them, are in the order of stock's buffers, which depends on its layout; they
are refused before anything of them is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.training import get_args

from megatron_hetero.errors import CheckpointError
from megatron_hetero.runtime.parallel.texts import gather_texts

FORM_KEY = "distrib_optim_sharding_type"
FORM = "fully_reshardable"
_OURS, _STOCK = "optimizer.state.fp32_param.", "optimizer.state.param."
_MOMENT = "exp_avg"
_MAIN = "fp32_from_fp16_params"
_STOCKS = "param_state_sharding_type"

Build = Callable[..., Any]


def follow_form(build: Build) -> Build:
    """Wrap `build` of an optimizer: the built optimizer reads and writes stock's form where a
    checkpoint's metadata ask for stock's form.

    Args:
        build: as of `runtime.megatron.optimizer.apply`.
    Raises:
        CheckpointError: at a load, by the built optimizer: the state is in the order of buffers.
    """

    def built(*args: Any, **kwargs: Any) -> Any:
        optimizer = build(*args, **kwargs)
        describe, load = optimizer.sharded_state_dict, optimizer.load_state_dict

        def sharded_state_dict(model_state: Any, is_loading: bool = False, **named: Any) -> Any:
            # The form that this checkpoint has, or is to get.
            form = (named.get("metadata") or {}).get(FORM_KEY)
            if is_loading and form not in (None, FORM):
                raise CheckpointError(_by_buffer(form))
            state = describe(model_state, is_loading, **named)
            if form != FORM:
                return state
            # A load asks in the ordinary form, under stock's keys, and is turned around afterwards.
            if not is_loading:
                state = _as_stock(state, optimizer.get_parameters())
            return dict_list_map_inplace(_with_stocks_key, state)

        def load_state_dict(state: Any) -> None:
            load(_as_ordinary(state) if _is_stocks(state) else state)

        optimizer.sharded_state_dict = sharded_state_dict
        optimizer.load_state_dict = load_state_dict
        return optimizer

    return built


def _by_buffer(form: str) -> str:
    """Say why state in the order of buffers cannot be had: most forms of stock's."""
    return (
        f"--load {get_args().load}: the optimizer's state was saved by stock Megatron's "
        f"distributed optimizer in the order of its buffers ({form}), which other layouts cannot "
        "read. Let stock Megatron load it, with --use-distributed-optimizer, and save it with "
        "--dist-ckpt-optim-fully-reshardable, which any plan reads; or start from the weights "
        "alone, with --no-load-optim, where Adam's moments begin anew."
    )


def _with_stocks_key(entry: Any) -> Any:
    if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.key.startswith(_OURS):
        return replace(entry, key=_STOCK + entry.key.removeprefix(_OURS))
    return entry


def _inner(state: Any) -> Any:
    """Return torch's part of a state, a level down in half precision."""
    return state.get("optimizer", state)


def _as_stock(state: dict[str, Any], parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """Return Megatron's description of an ordinary optimizer's state as stock's of a distributed
    one.  Collective.

    Args:
        state: of half precision or of fp32.
        parameters: whose state it is, in the order of their numbers there.
    """
    inner = _inner(state)
    # What is common to all ranks is written by rank 0, which may own nothing.
    step = max(gather_texts(_text_of(inner["state"].pop("common_step", None))))
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        | ({"step": float(step)} if step else {})
        for group in inner["param_groups"]
    ]
    # Moments of every parameter, then main weights.
    entries = [entry for of in inner["state"].values() for entry in of.values()]
    if _MAIN in state:
        entries += [entry for group in state[_MAIN] for entry in group]
    else:
        entries += [
            _main_weight(of[_MOMENT], parameters[number]) for number, of in inner["state"].items()
        ]
    return {
        **{name: state[name] for name in ("grad_scaler",) if name in state},
        "optimizer": {"param_groups": groups},
        "param_state": dict(enumerate(entries)),
        _STOCKS: FORM,
    }


def _text_of(step: Any) -> str:
    return "" if step is None else repr(float(step))


def _main_weight(moment: Any, weight: torch.nn.Parameter) -> Any:
    """Describe a weight that is also the main weight, after the description of the moment."""
    key = _OURS + moment.key.removeprefix(f"optimizer.state.{_MOMENT}.")
    return replace(moment, key=key, data=weight.detach())


def _is_stocks(state: Mapping[Any, Any]) -> bool:
    return _STOCKS in state.get(0, state)


def _as_ordinary(state: dict[Any, Any]) -> dict[str, Any]:
    """Return what was read of stock's state as an ordinary optimizer's.

    Tensors are where this job asked for them already.  Stock has the experts that it deals out in
    a second optimizer; their parameter groups say what those of the first do.
    """
    # The first optimizer's parameter groups and scaler stand for all; named entries are this job's.
    common = state.get(0, state)
    made = {name: value for name, value in state.items() if isinstance(name, str)}
    made = {name: value for name, value in made.items() if name not in ("param_state", _STOCKS)}
    if "grad_scaler" in common:
        made["grad_scaler"] = common["grad_scaler"]
    # Settings and step as saved, and the parameters' numbers as in this job.
    inner = made if "state" in made else dict(made["optimizer"])
    groups = common["optimizer"]["param_groups"]
    step = next((group["step"] for group in groups if "step" in group), None)
    numbers = [group["params"] for group in inner["param_groups"] if "params" in group]
    saved = [dict(group) for group in groups]
    if not HAVE_APEX_OR_TE:
        # torch's own optimizers count steps with each parameter.
        for group in saved:
            group.pop("step", None)
        if step is not None:
            inner["state"]["common_step"] = torch.tensor(float(step))
    # Saved settings, with this job's parameters.
    inner["param_groups"] = [
        {**group, "params": own} for group, own in zip(saved, numbers, strict=True)
    ]
    if inner is made:
        made.pop("optimizer", None)
        return made
    return {**made, "optimizer": inner}
