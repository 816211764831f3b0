"""Buckets of gradients: slices, their holders, and one order of the buckets on all ranks.

Every parameter is cut at the union of all ranks' shard edges. Slices of all parameters with the
same set of holders share buckets, one collective each. A layer norm under sequence parallelism, a
tied embedding on two stages, and a layer at width 4 in one replica and 3 in another are all the
same: slices with holders.

The order of the buckets is that in which the backward pass of the last micro-batch finishes them,
deep layers first. Every rank starts its own buckets in this order, so no two ranks ever wait for
each other with unlike buckets. Nothing here communicates.

Example: a matrix of 12 rows is held at width 2 in replica 0 (ranks 0 and 1) and at width 3 in
replica 1 (ranks 2 to 4). The edges 0, 4, 6, 8, 12 cut it into slices with the holders (0, 2), (0,
3), (1, 3) and (1, 4).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch

from megatron_hetero.cost.sync.buckets import MAX_BUCKET_ELEMENTS
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.runtime.parallel.shards import ParameterShard

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class ParameterSlice:
    """Slice `start:stop` along the divided dimension of global parameter `name`."""

    name: str
    start: int
    stop: int

    def shape(self, shard: ParameterShard) -> tuple[int, ...]:
        """Return the shape of this slice; `shard` is any rank's shard of the parameter."""
        shape = list(shard.global_shape)
        shape[shard.dim] = self.stop - self.start
        return tuple(shape)

    def view(self, shards: Mapping[str, ParameterShard], tensor: torch.Tensor) -> torch.Tensor:
        """Return this slice as a view of a local tensor of its parameter."""
        shard = shards[self.name]
        return tensor.narrow(shard.dim, shard.local_offset(self.start), self.stop - self.start)


@dataclass(frozen=True)
class Bucket:
    """Slices with the same holders, in the order of the flat buffer.

    `layer` is the sharded layer of these slices; None if the layers are not sharded.
    `num_elements` counts the elements of all slices.
    """

    holders: tuple[int, ...]
    slices: tuple[ParameterSlice, ...]
    layer: int | None = None
    num_elements: int = field(default=0, compare=False)

    @property
    def depth(self) -> float:
        """Return the depth of the last layer of a backward pass that completes the bucket."""
        return min(depth(piece.name) for piece in self.slices)


_BucketKey = tuple[tuple[int, ...], int | None]
"""(holders, sharded layer)."""


@dataclass(frozen=True)
class _BucketPiece:
    """A slice with its holders; a local one needs no communication."""

    slice: ParameterSlice
    holders: tuple[int, ...]
    size: int
    is_local: bool


def plan_buckets(
    tables: Sequence[Mapping[str, ParameterShard]],
    tensor_groups: Sequence[tuple[int, ...]],
    max_elements: int = MAX_BUCKET_ELEMENTS,
    sharded: Collection[int] = (),
) -> tuple[Bucket, ...]:
    """Group the slices of all parameters by their holders.

    Args:
        tables: [rank] -> shards by name, in the order of the rank's model.
        tensor_groups: [rank] -> its tensor-parallel group, as (replica, stage, context-parallel
            rank).
        max_elements: most elements of one bucket, unless a single slice is larger.
        sharded: numbers of the sharded layers, each of which has buckets of its own.
    Returns:
        Buckets of two holders and more, in the order in which every rank starts its own. Slices
        that need no communication are left out: those with one holder, and copies inside one
        tensor-parallel group, which Megatron keeps equal by itself.
    Raises:
        PlanFormatError: ranks disagree about a parameter's global shape.
    """
    # Open buckets by their holders: slices, elements, and the place of the newest slice.
    buckets: list[tuple[int, Bucket]] = []
    parts: dict[_BucketKey, list[ParameterSlice]] = {}
    sizes: dict[_BucketKey, int] = {}
    last: dict[_BucketKey, int] = {}

    def close(key: _BucketKey, place: int) -> None:
        holders, layer = key
        buckets.append((place, Bucket(holders, tuple(parts.pop(key)), layer, sizes.pop(key))))

    # Slices come in the order of the backward pass; a copy inside a group needs no exchange.
    for place, piece in enumerate(_pieces(tables, tensor_groups)):
        if piece.is_local:
            continue
        # Slices of a sharded layer stay together, all others by size alone.
        layer = layer_number(piece.slice.name)
        key = piece.holders, layer if layer in sharded else None
        # A full bucket is closed before the slice that would overflow it.
        if key[1] is None and key in parts and sizes[key] + piece.size > max_elements:
            close(key, last[key])
        parts.setdefault(key, []).append(piece.slice)
        sizes[key] = sizes.get(key, 0) + piece.size
        last[key] = place
    for key in tuple(parts):
        close(key, last[key])
    # A bucket is done with its last slice.
    return tuple(bucket for _, bucket in sorted(buckets, key=lambda entry: entry[0]))


def local_slices(
    tables: Sequence[Mapping[str, ParameterShard]],
    tensor_groups: Sequence[tuple[int, ...]],
    rank: int,
) -> tuple[ParameterSlice, ...]:
    """Return the slices of `rank` without a bucket, since no communication is needed."""
    pieces = _pieces(tables, tensor_groups)
    return tuple(piece.slice for piece in pieces if piece.is_local and rank in piece.holders)


def _pieces(
    tables: Sequence[Mapping[str, ParameterShard]], tensor_groups: Sequence[tuple[int, ...]]
) -> Iterator[_BucketPiece]:
    """Yield all slices of the job, in the order of the backward pass."""
    # Parameter -> ranks that have it, in ascending order.
    holders_of: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        for name in table:
            holders_of.setdefault(name, []).append(rank)
    for name in backward_order(tables):
        shards = {rank: tables[rank][name] for rank in holders_of[name]}
        _require_equal_shapes(name, shards)
        first = shards[holders_of[name][0]]
        # Cut the divided dimension wherever any rank cuts it.
        edges = {edge for s in shards.values() for interval in s.intervals for edge in interval}
        for start, stop in pairwise(sorted(edges)):
            holders = tuple(rank for rank, shard in shards.items() if shard.holds(start, stop))
            if not holders:
                continue
            # Copies inside a tensor-parallel group stay equal by themselves, partial sums do not.
            one_group = len({tensor_groups[rank] for rank in holders}) == 1
            partial = any(shards[rank].is_partial for rank in holders)
            is_local = len(holders) == 1 or (one_group and not partial)
            piece = ParameterSlice(name, start, stop)
            yield _BucketPiece(piece, holders, prod(piece.shape(first)), is_local)


def backward_order(tables: Sequence[Mapping[str, ParameterShard]]) -> list[str]:
    """Sort the names of all parameters as the last micro-batch's backward pass finishes them.

    Parameters behind the layers come first, then the layers from the last to the first, then the
    embeddings; a tied embedding has its last gradient there too.
    """
    keys: dict[str, tuple[float, int]] = {}
    for table in tables:
        for position, name in enumerate(table):
            # The first rank that has a parameter gives it its position.
            keys.setdefault(name, (depth(name), position))
    return sorted(keys, key=lambda name: (keys[name], name), reverse=True)


def layer_number(name: str) -> int | None:
    """Return the number, from 0, of the layer that a parameter is in; None outside of layers, and
    in those behind them that predict further tokens."""
    layer = None if name.startswith("mtp.") else _LAYER.search(name)
    return None if layer is None else int(layer.group(1))


def depth(name: str) -> float:
    """Return the number of a parameter's layer; -1 before the layers, infinite behind them."""
    layer = layer_number(name)
    if layer is not None:
        return float(layer)
    return -1.0 if name.startswith("embedding.") else float("inf")


def _require_equal_shapes(name: str, shards: Mapping[int, ParameterShard]) -> None:
    (first_rank, first), *rest = shards.items()
    for rank, shard in rest:
        if (shard.global_shape, shard.dim) != (first.global_shape, first.dim):
            raise PlanFormatError(
                f"{name}: rank {first_rank} holds a part of a tensor of shape "
                f"{first.global_shape} divided along {first.dim}, rank {rank} of "
                f"{shard.global_shape} along {shard.dim}; all ranks must build the same model."
            )
