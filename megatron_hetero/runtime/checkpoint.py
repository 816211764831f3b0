"""Checkpoints with global shapes: written under one plan, read under another or by stock Megatron.

Megatron describes each tensor of a checkpoint by its place in the global one.  Three things of that
description assume equal ranks and are corrected here, on the model's own `sharded_state_dict`: the
grid that says all pieces are equal is left out (Megatron's own way for uneven pieces), copies are
told apart by replica, and layers get keys of their own (`runtime.megatron.checkpoint_metadata`).
The optimizer derives its description from the model's, so it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.utils import unwrap_model

from megatron_hetero.runtime.groups import RankGroups
from megatron_hetero.runtime.megatron.checkpoint_metadata import ONE_KEY_PER_LAYER


def describe_globally(model: Sequence[Any], groups: RankGroups) -> None:
    """Make `model` describe its tensors for checkpoints of asymmetric plans.

    Loading a checkpoint of stock Megatron keeps Megatron's own description.
    """
    for chunk in unwrap_model(list(model)):
        chunk.sharded_state_dict = _corrected(chunk.sharded_state_dict, groups.position.replica)


def _corrected(original: Callable[..., Any], replica: int) -> Callable[..., Any]:
    def sharded_state_dict(
        prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        state = original(prefix, sharded_offsets, metadata)
        if metadata is None or not metadata.get(ONE_KEY_PER_LAYER):
            return state
        return dict_list_map_inplace(lambda entry: _correct(entry, replica), state)

    return sharded_state_dict


def _correct(entry: Any, replica: int) -> Any:
    if isinstance(entry, ShardedTensor):
        return replace(
            entry, axis_fragmentations=None, replica_id=_of_replica(entry.replica_id, replica)
        )
    if isinstance(entry, ShardedTensorFactory):
        # Builds the pieces of a gated projection, also those of its optimizer state.
        build = entry.build_fn

        def build_corrected(*args: Any) -> Any:
            return dict_list_map_inplace(lambda piece: _correct(piece, replica), build(*args))

        return replace(
            entry,
            build_fn=build_corrected,
            replica_id=_of_replica(entry.replica_id, replica),
        )
    if isinstance(entry, ShardedObject):
        return replace(entry, replica_id=_of_replica(entry.replica_id, replica))
    return entry


def _of_replica(replica_id: Any, replica: int) -> Any:
    """Megatron's replica ids end with the data-parallel rank; the writer's is all zeros."""
    if isinstance(replica_id, tuple):
        return (*replica_id[:-1], replica)
    return replica
