"""Checkpoints with global shapes: written under one plan, read under another or by stock Megatron.

Megatron describes each tensor of a checkpoint by its place in the global one.  What of that
description assumes equal ranks is corrected here, on the model's own `sharded_state_dict`: the grid
that says all pieces are equal is left out (Megatron's own way for uneven pieces), pieces of uneven
groups get their true places, copies are told apart by replica, and layers get keys of their own
(`runtime.megatron.checkpoint_metadata`).  The optimizer derives its description from the model's,
so it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.utils import get_model_config, unwrap_model

from megatron_hetero.runtime.megatron.checkpoint_metadata import ONE_KEY_PER_LAYER
from megatron_hetero.runtime.parallel.shards import ParameterShard, global_parameters, shard_of
from megatron_hetero.runtime.parallel.tensor_place import tensor_place
from megatron_hetero.runtime.state.random_states import RandomStates


def describe_globally(
    model: Sequence[Any],
    replica: int,
    expert_copy: int,
    before: Callable[[], None] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make `model`, copy number `replica` in the job (its experts `expert_copy`), describe its
    tensors in the global model.

    Loading a checkpoint of stock Megatron keeps Megatron's own description of places.  `before` is
    called first each time: what makes the tensors what they should be.  With `dtype` all weights
    are written and read in it, whatever this stage computes in.
    """
    config = get_model_config(model[0])
    shards = {name: shard_of(name, p, config) for name, p in global_parameters(model)}
    # Where the group divides everything evenly, Megatron's own places are right.
    uneven = {} if tensor_place(config).is_even else shards
    correct = _Correction(replica, expert_copy, uneven)
    for chunk in unwrap_model(list(model)):
        chunk.sharded_state_dict = _corrected(chunk.sharded_state_dict, correct, before, dtype)


def carry_random_states(chunk: Any, states: RandomStates) -> None:
    """Let the states travel with `chunk`: into the checkpoints it describes, and out of them."""
    describe, load = chunk.sharded_state_dict, chunk.load_state_dict
    # Metadata of the newest description: a load describes first, so they are the checkpoint's.
    seen: dict[str, Any] = {}

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        seen.clear()
        seen.update(metadata or {})
        state = describe(prefix, sharded_offsets, metadata)
        return state | states.described(metadata)

    def load_state_dict(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return load(states.take(state_dict, seen), *args, **kwargs)

    chunk.sharded_state_dict = sharded_state_dict
    chunk.load_state_dict = load_state_dict


def _corrected(
    original: Callable[..., Any],
    correct: _Correction,
    before: Callable[[], None] | None,
    dtype: torch.dtype | None,
) -> Callable[..., Any]:
    def sharded_state_dict(
        prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        # Weights that are under way or sharded are made whole.
        if before is not None:
            before()
        state = original(prefix, sharded_offsets, metadata)
        is_stacked = metadata is None or not metadata.get(ONE_KEY_PER_LAYER)
        # Stacked layers of an even group stand at their places: only copies need numbers.
        if is_stacked and not correct.uneven_shards:
            state = dict_list_map_inplace(correct.copies_alone, state)
        else:
            state = dict_list_map_inplace(replace(correct, is_stacked=is_stacked), state)
        if dtype is not None:
            state = dict_list_map_inplace(partial(_in_dtype, dtype=dtype), state)
        return state

    return sharded_state_dict


def keep_axes(entry: ShardedTensor) -> ShardedTensor | ShardedTensorFactory:
    """Keep the axes that Megatron puts before a local tensor, such as the expert's number.

    Pieces outside of a grid are written as they are in memory, without such axes. So the tensor is
    written as a view that has them, and read back without.
    """
    if not entry.prepend_axis_num:
        return entry

    def build(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        return [_expanded(replace(entry, key=key, data=data, replica_id=replica_id))]

    def merge(pieces: list[torch.Tensor]) -> torch.Tensor:
        return pieces[0].reshape(entry.local_shape)

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)


def _in_dtype(entry: Any, dtype: torch.dtype) -> Any:
    """Let a weight be written and read in `dtype`; its optimizer state stays in its own."""
    if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
        return entry
    if not isinstance(entry.data, torch.Tensor) or entry.data.dtype == dtype:
        return entry

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened: Any) -> Any:
        # The state of the optimizer takes the place of the weight here, under a key of its own.
        given = data.detach().to(dtype) if key == entry.key else data
        if isinstance(entry, ShardedTensorFactory):
            return entry.build_fn(key, given, replica_id, flattened)
        changes = {"key": key, "data": given, "dtype": given.dtype, "replica_id": replica_id}
        return [replace(entry, **changes)]

    def merge(pieces: list[torch.Tensor]) -> Any:
        return entry.merge_fn(pieces) if isinstance(entry, ShardedTensorFactory) else pieces[0]

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)


def _expanded(entry: ShardedTensor) -> ShardedTensor:
    if not entry.prepend_axis_num:
        return entry
    # One element on each axis before, whose number stands in the offset.
    shape = (*[1] * entry.prepend_axis_num, *entry.local_shape)
    data = entry.data.view(shape)
    return replace(entry, data=data, dtype=data.dtype, local_shape=shape, prepend_axis_num=0)


@dataclass(frozen=True)
class _Correction:
    """Corrects one entry of a sharded state dict.

    `uneven_shards` are the true places of this rank's pieces by name, where its tensor-parallel
    group divides the model unevenly; empty where Megatron's own places are right.  `is_stacked`:
    all layers are in one tensor, as stock Megatron has them for GPT.
    """

    replica: int
    expert_copy: int
    uneven_shards: Mapping[str, ParameterShard]
    is_stacked: bool = False

    def __call__(self, entry: Any) -> Any:
        if isinstance(entry, ShardedTensor):
            return keep_axes(self._tensor(entry, 0))
        if isinstance(entry, ShardedTensorFactory):
            # Builds the two pieces of a gated projection, also those of its optimizer state.
            build = entry.build_fn

            def build_corrected(*args: Any) -> Any:
                pieces = build(*args)
                return [_expanded(self._tensor(p, block)) for block, p in enumerate(pieces)]

            # Pieces are read with the axes before, which Megatron's function does not expect.
            def merge_corrected(pieces: list[torch.Tensor]) -> Any:
                return entry.merge_fn([p.reshape(p.shape[p.dim() - num_dims :]) for p in pieces])

            num_dims = entry.data.dim()
            return replace(
                entry,
                build_fn=build_corrected,
                merge_fn=merge_corrected,
                replica_id=self._copy(entry),
            )
        if isinstance(entry, ShardedObject):
            return replace(entry, replica_id=self._copy(entry))
        return entry

    def copies_alone(self, entry: Any) -> Any:
        """An entry whose place in the global tensor Megatron says rightly."""
        if isinstance(entry, ShardedTensor | ShardedTensorFactory | ShardedObject):
            return replace(entry, replica_id=self._copy(entry))
        return entry

    def _copy(self, entry: Any) -> Any:
        """Return the entry's replica id, with the number of the copy in the job."""
        of_experts = ".mlp.experts." in entry.key
        return _of_replica(entry.replica_id, self.expert_copy if of_experts else self.replica)

    def _tensor(self, entry: ShardedTensor, block: int) -> ShardedTensor:
        changes: dict[str, Any] = {
            # Without a grid, pieces of one tensor may have unlike sizes.
            "axis_fragmentations": None,
            "replica_id": self._copy(entry),
        }
        shard = self._shard(entry)
        if shard is not None and shard.is_sharded:
            # Experts of a layer share a key, and stacked layers do; which of them a tensor is
            # stands on an axis before.
            axes = entry.prepend_axis_num
            offset = [*entry.global_offset[:axes], *[0] * len(shard.global_shape)]
            offset[axes + shard.dim] = shard.intervals[block][0]
            changes |= {
                "global_shape": (*entry.global_shape[:axes], *shard.global_shape),
                "global_offset": tuple(offset),
            }
        return replace(entry, **changes)

    def _shard(self, entry: ShardedTensor) -> ParameterShard | None:
        """Return the shard of the parameter, or of an optimizer state, with the key's ending.

        All experts of a layer are divided alike, so the first stands for them.
        """
        key = entry.key.replace(".experts.experts.", ".experts.local_experts.0.")
        # Megatron's older name of the layer in one that predicts further tokens.
        key = key.replace(".transformer_layer.", ".mtp_model_layer.")
        # Stacked layers share a key, and the first offset is the layer's number.
        if self.is_stacked and entry.prepend_axis_num:
            key = key.replace("layers.", f"layers.{entry.global_offset[0]}.", 1)
        for name, shard in self.uneven_shards.items():
            if key == name or key.endswith("." + name):
                return shard
        return None


def _of_replica(replica_id: Any, replica: int) -> Any:
    """Replace the data-parallel rank at the end of a replica id; the writer's id is all zeros."""
    if isinstance(replica_id, tuple):
        return (*replica_id[:-1], replica)
    return replica
