"""Checkpoints between Transformer Engine's layers and Megatron's local ones, in both directions.

Weights and moments are the same tensors. Three things differ. The norm before the experts has
another name: local layers name it as part of the MLP's first matrix, where Transformer Engine has
the norm before a dense MLP alone. Transformer Engine's layers have an extra state each, for fp8,
which is empty without it; few local layers have one. And its Adam counts steps with a parameter
group (`step`), torch's with each parameter, which Megatron writes once as `common_step`; the one
taken for the other begins to count anew, or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_hetero.runtime.state.metadata_reading import read_metadata

NORM = "pre_mlp_layernorm."
"""The norm before an MLP, as a part of a layer; before experts Transformer Engine's key too."""
_NORM_NAMES = (NORM, "mlp.linear_fc1.layer_norm_")
_EXTRA = "_extra_state"
_STEP, _COMMON_STEP = "step", "common_step"
_OF_EACH_PARAMETER = "amsgrad"
"""Key of a parameter group that torch's Adam has, and Transformer Engine's has not."""


def load(
    original: Callable[..., Any], wanted: Any, checkpoint_dir: Any, *given: Any, **named: Any
) -> Any:
    """Load a checkpoint's data with Megatron's `original`, whichever layers wrote it.

    Args:
        original: `dist_checkpointing.load`.
        wanted: the sharded state dict of this rank.
        checkpoint_dir: folder of the checkpoint.
        given: as Megatron's.
        named: as Megatron's.
    """
    groups = list(_optimizers(wanted))
    path = Path(str(checkpoint_dir)) / ".metadata"
    there = read_metadata(path).state_dict_metadata if path.exists() else None
    # Megatron fails on what a checkpoint lacks: empty extra states are not asked for.
    absent = [] if there is None else list(_take_absent(wanted, there))
    if there is not None:
        _name_norms(wanted, there)
    loaded = original(wanted, checkpoint_dir, *given, **named)
    state = loaded[0] if isinstance(loaded, tuple) else loaded
    # In the loaded state they stand where their layers look for them.
    for place in absent:
        part = state
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = torch.empty(0, dtype=torch.uint8)
    for found, now in zip(_optimizers(state), groups, strict=False):
        _translate(found, now)
    return loaded


def _take_absent(
    wanted: Any, there: Container[str], place: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """Take the extra states absent from a checkpoint out of `wanted`; yield the places.

    Args:
        wanted: a sharded state dict, or a part of one.
        there: keys of the checkpoint.
        place: keys that lead to the part.
    """
    for key, value in list(wanted.items()):
        if isinstance(value, dict):
            yield from _take_absent(value, there, (*place, key))
        elif (
            isinstance(value, ShardedObject)
            and _EXTRA in value.key
            and value.unique_key not in there
        ):
            del wanted[key]
            yield (*place, key)


def _name_norms(wanted: Any, there: Container[str]) -> None:
    """Ask for norms before experts, and their moments, by the names that a checkpoint has."""
    if isinstance(wanted, ShardedTensor):
        if wanted.key in there:
            return
        for own, other in (_NORM_NAMES, _NORM_NAMES[::-1]):
            name = wanted.key.replace(own, other)
            if own in wanted.key and name in there:
                wanted.key = name
                return
    elif isinstance(wanted, dict):
        for value in wanted.values():
            _name_norms(value, there)
    elif isinstance(wanted, list | tuple):
        for value in wanted:
            _name_norms(value, there)


def _optimizers(state: Any) -> Iterator[dict[str, Any]]:
    """Yield an optimizer's parts of a state dict, in order."""
    if isinstance(state, dict):
        if "param_groups" in state:
            yield state
            return
        for value in state.values():
            yield from _optimizers(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _optimizers(value)


def _translate(found: dict[str, Any], now: dict[str, Any]) -> None:
    """Turn a loaded optimizer's state into the kind that this process has, in place.

    Args:
        found: as it was loaded.
        now: as it was asked for, whose parameter groups are of this process's kind.
    """
    groups, template = found["param_groups"], now["param_groups"]
    # A rank may own no parameters.
    if not groups or not template:
        return
    is_torchs = _OF_EACH_PARAMETER in template[0]
    steps = [group[_STEP] for group in groups if _STEP in group]
    # Stock's divided state, which has no part of this name, has the step with the groups for both.
    of_parameters = found.get("state", {})
    if is_torchs and steps and "state" in found:
        for group in groups:
            group.pop(_STEP, None)
        of_parameters[_COMMON_STEP] = torch.tensor(float(max(map(int, steps))))
    # torch's one step becomes the step of each group.
    elif not is_torchs and _COMMON_STEP in of_parameters:
        step = int(of_parameters.pop(_COMMON_STEP))
        for group in groups:
            group[_STEP] = step
    # Settings of the other kind of optimizer are missing: this job's values stand in.
    for group in groups:
        for key, value in template[0].items():
            if key not in ("params", _STEP):
                group.setdefault(key, value)
