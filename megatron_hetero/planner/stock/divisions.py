"""All divisions of the layers of a model over pipeline stages and their model chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

Divisions = NDArray[np.int64]


def num_stage_divisions(num_layers: int, allowed: Sequence[Sequence[int]]) -> int:
    """Return how many rows `stage_divisions` gives."""
    # ways[n]: how many ways the stages so far have to hold n layers.
    ways = np.zeros(num_layers + 1)
    ways[0] = 1
    for counts in allowed:
        one = np.zeros(num_layers + 1)
        one[[c for c in counts if c <= num_layers]] = 1
        ways = np.convolve(ways, one)[: num_layers + 1]
    return int(ways[num_layers])


def stage_divisions(num_layers: int, allowed: Sequence[Sequence[int]]) -> Divisions:
    """Return every way to give each stage an allowed number of layers, `num_layers` in all.

    Returns:
        Shape [division, stage].
    """
    rows = np.zeros((1, 0), dtype=np.int64)
    # Least and most layers of this and all later stages.
    least = np.cumsum([min(counts, default=0) for counts in allowed][::-1])[::-1]
    most = np.cumsum([max(counts, default=0) for counts in allowed][::-1])[::-1]
    for stage, counts in enumerate(allowed):
        choices = np.array(sorted(counts), dtype=np.int64)
        # [division so far, stage]: each row once for each choice.
        rows = np.column_stack([np.repeat(rows, len(choices), axis=0), np.tile(choices, len(rows))])
        left = num_layers - rows.sum(axis=1)
        is_last = stage + 1 == len(allowed)
        # Rows that later stages cannot complete leave at once, which keeps the table small.
        low, high = (0, 0) if is_last else (least[stage + 1], most[stage + 1])
        rows = rows[(low <= left) & (left <= high)]
    return rows


def in_even_chunks(stages: Divisions, num_chunks: int) -> Divisions:
    """Return each stage's layers in chunks with sizes at most one layer apart, larger chunks first.

    Args:
        stages: shape [division, stage].
    Returns:
        Shape [division, virtual stage], in the order of the chain: all first chunks, all second.
    """
    each, larger = stages // num_chunks, stages % num_chunks
    return np.column_stack([each + (chunk < larger) for chunk in range(num_chunks)])


def moves(division: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the divisions with a layer moved to another stage or chunk."""
    for giver, taker in permutations(range(len(division)), 2):
        if division[giver] > 1:
            moved = list(division)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)
