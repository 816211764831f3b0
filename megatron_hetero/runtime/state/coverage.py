"""Every element of every tensor exactly once: Megatron's sharding check for unlike pieces.

Megatron counts the cells of a grid of equal pieces.  Pieces of unlike stages and shares lie in no
such grid; here they are boxes, which must tile the global tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

Box = tuple[tuple[int, int], ...]
"""[axis] -> (first, one after the last) element."""


def is_a_grid(pieces: Sequence[tuple[int, ShardedTensor]]) -> bool:
    """Pieces as Megatron's own check takes them: alike, in one grid."""
    alike = {(piece.local_shape, piece.axis_fragmentations) for _, piece in pieces}
    return len(alike) == 1 and all(piece.has_regular_grid for _, piece in pieces)


def faults_of(pieces: Sequence[tuple[int, ShardedTensor]]) -> list[str]:
    """List the faults of all ranks' pieces of a tensor; empty if the pieces tile the tensor.

    Args:
        pieces: (rank, its piece); copies are left out by their replica.
    """
    key = pieces[0][1].key
    for what in ("global_shape", "dtype"):
        found = {str(getattr(piece, what)) for _, piece in pieces}
        if len(found) > 1:
            return [f"{key}: ranks disagree on its {what}: {', '.join(sorted(found))}"]
    shape = pieces[0][1].global_shape
    return [
        f"{key}: {fault}"
        for fault in tiling_faults(
            shape, [(r, _box(piece)) for r, piece in pieces if is_main_replica(piece.replica_id)]
        )
    ]


def tiling_faults(shape: Sequence[int], boxes: Sequence[tuple[int, Box]]) -> list[str]:
    """Why the boxes of ranks do not tile a tensor of `shape`; nothing where they do."""
    for rank, box in boxes:
        if len(box) != len(shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
        ):
            return [f"rank {rank} has {_words(box)}, outside of {tuple(shape)}"]
    held = sum(_volume(box) for _, box in boxes)
    faults = []
    # Boxes that are alike on all axes but few are compared once each; tensors have few pieces.
    for (first, a), (second, b) in combinations(boxes, 2):
        if all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a, b, strict=True)):
            faults.append(f"ranks {first} and {second} both have part of {_words(a)}")
    # Boxes that overlap nowhere tile the tensor if they have as many elements.
    if not faults and held != prod(shape):
        faults.append(f"{held} of {prod(shape)} elements are held by the ranks together")
    return faults


def _box(piece: ShardedTensor) -> Box:
    # One element on each axis that Megatron puts before.
    shape: tuple[Any, ...] = (*[1] * piece.prepend_axis_num, *piece.local_shape)
    return tuple((o, o + n) for o, n in zip(piece.global_offset, shape, strict=True))


def _volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def _words(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
