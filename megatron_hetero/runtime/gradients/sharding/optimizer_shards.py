"""Owners of the optimizer's state, where it is divided (ZeRO-1).

The holders of a bucket divide it among themselves in its own order: each owns a range of the flat
buffer that begins and ends with a row of a slice. An owned piece is therefore a box of the global
tensor, a view of the local one, and a range of the reduced and gathered buffer. It has as many
dimensions as its parameter, so that Megatron's rules for parameter groups (weight decay) apply to
it unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from megatron_hetero.runtime.gradients.buckets import Bucket, ParameterSlice
from megatron_hetero.runtime.parallel.shards import ParameterShard


@dataclass(frozen=True)
class Rows:
    """Rows `start:stop` (of dimension 0, counted inside the slice) of a slice."""

    slice: ParameterSlice
    start: int
    stop: int

    def view(self, shards: Mapping[str, ParameterShard], tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows as a view of the parameter's local tensor."""
        return self.slice.view(shards, tensor).narrow(0, self.start, self.stop - self.start)


@dataclass(frozen=True)
class Division:
    """Division of a bucket among its holders: [holder] -> its rows, and their number of elements.

    The holders' ranges follow one another in the flat buffer.
    """

    rows: tuple[tuple[Rows, ...], ...]
    sizes: tuple[int, ...]

    def span(self, holder: int) -> tuple[int, int]:
        """Return the holder's range (start, stop) of the flat buffer."""
        start = sum(self.sizes[:holder])
        return start, start + self.sizes[holder]


def divide(
    bucket: Bucket, shards: Mapping[str, ParameterShard], weights: Sequence[int]
) -> Division:
    """Divide a bucket among its holders in proportion to `weights`, to the nearest row.

    Args:
        bucket: the bucket.
        shards: any holder's shards, by name; only shapes are read, so all holders agree.
        weights: [holder] -> relative size of its range, > 0.
    """
    # Ideal cuts of the bucket, in elements.
    sizes = [prod(piece.shape(shards[piece.name])) for piece in bucket.slices]
    total, whole = sum(sizes), sum(weights)
    cuts = [total * sum(weights[: i + 1]) / whole for i in range(len(weights) - 1)]
    rows: list[list[Rows]] = [[] for _ in weights]
    offset, owner = 0, 0
    # Walk the slices, and cut each at the row nearest to an ideal cut inside it.
    for piece, size in zip(bucket.slices, sizes, strict=True):
        num_rows = piece.shape(shards[piece.name])[0]
        row_size = size // num_rows
        start = 0
        while owner < len(cuts) and cuts[owner] <= offset + size:
            stop = min(max(round((cuts[owner] - offset) / row_size), start), num_rows)
            if stop > start:
                rows[owner].append(Rows(piece, start, stop))
            start, owner = stop, owner + 1
        # The rest of the slice goes to the present owner.
        if start < num_rows:
            rows[owner].append(Rows(piece, start, num_rows))
        offset += size
    # Count the elements of each owner's rows.
    return Division(
        tuple(tuple(own) for own in rows),
        tuple(
            sum(prod(r.slice.shape(shards[r.slice.name])[1:]) * (r.stop - r.start) for r in own)
            for own in rows
        ),
    )


def division_by_rank(
    bucket: Bucket, shards: Mapping[str, ParameterShard], weights: Sequence[int]
) -> Division:
    """Divide a bucket as `divide` does, by weights of all ranks of the job, [rank]."""
    return divide(bucket, shards, [weights[rank] for rank in bucket.holders])
