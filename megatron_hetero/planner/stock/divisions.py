"""Divisions of the layers of a model over pipeline stages and their model chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.planner.stock.limits import FEW_DIVISIONS
from megatron_hetero.rounding import at_most, below

Divisions = NDArray[np.int64]
"""Layers of each virtual stage, shape [division, virtual stage]."""
MAX_DIVISIONS = 200_000
"""Divisions up to which all divisions of a case are priced; beyond, as few as the limits say."""


class _Divided(Protocol):
    """A case as far as its divisions are concerned."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_chunks(self) -> int: ...

    def pace_s(self) -> float: ...

    def chunks_of_stages(self) -> Sequence[NDArray[np.int64]]: ...

    def stage_layers(self, below_s: float) -> list[list[int]]: ...


def divisions_in_time(case: _Divided, below_s: float, few: int) -> tuple[Divisions, bool]:
    """Return the divisions of a case in even chunks that could end before `below_s`, and whether
    they are all; of too many those with the fastest slowest stage.

    Args:
        few: divisions to take of too many.
    """
    is_all, most = True, few if few < FEW_DIVISIONS else MAX_DIVISIONS

    def number(limit_s: float) -> int:
        return num_stage_divisions(case.num_layers, case.stage_layers(limit_s))

    # Too many to price: first a limit with few divisions, then bisection up to it.
    if number(below_s) > most:
        low_s = case.pace_s()
        high_s = low_s
        while high_s < below_s and number(high_s) <= few:
            high_s *= 1.5
        high_s = min(high_s, below_s)
        while not at_most(high_s, low_s * 1.001):
            middle_s = (low_s + high_s) / 2
            is_few = number(middle_s) <= few
            low_s, high_s = (middle_s, high_s) if is_few else (low_s, middle_s)
        below_s = low_s if number(low_s) else high_s
        is_all = False
    stages = stage_divisions(case.num_layers, case.stage_layers(below_s), 4 * most)
    ways = [in_chunks(stages, chunks) for chunks in case.chunks_of_stages()]
    return np.unique(np.concatenate(ways), axis=0) if len(ways) > 1 else ways[0], is_all


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


def stage_divisions(
    num_layers: int, allowed: Sequence[Sequence[int]], most: int | None = None
) -> Divisions:
    """Return the ways to give each stage an allowed number of layers, `num_layers` in all: every
    one, or the first `most` where there are more.

    Returns:
        Shape [division, stage].
    """
    # completes[stage][n]: whether this and all later stages can have n layers together.
    completes = [np.arange(num_layers + 1) == 0]
    for counts in reversed(allowed):
        reached = np.zeros(num_layers + 1, dtype=np.bool_)
        for count in counts:
            reached[count:] |= completes[-1][: max(num_layers + 1 - count, 0)]
        completes.append(reached)
    completes.reverse()
    rows = np.zeros((1, 0), dtype=np.int64)
    for stage, counts in enumerate(allowed):
        choices = np.array(sorted(counts), dtype=np.int64)
        # [division so far, stage]: each row once for each choice.
        rows = np.column_stack([np.repeat(rows, len(choices), axis=0), np.tile(choices, len(rows))])
        left = num_layers - rows.sum(axis=1)
        # Rows that later stages cannot complete leave at once, and so do those behind the first
        # that are wanted: each row left is the start of a division, which keeps the table small.
        rows = rows[(left >= 0) & completes[stage + 1][np.maximum(left, 0)]][:most]
    return rows


def even_chunks(num_layers: int, num_chunks: int, head_layers: float) -> NDArray[np.int64]:
    """Return chunks that are as even as can be for each number of a stage's layers, larger chunks
    first; where the last chunk has the head, that chunk makes room for it.

    Args:
        num_layers: the most layers.
        head_layers: what the head takes on this stage, in layers.
    Returns:
        Shape [layers, chunk]; right from one layer a chunk on.
    """
    layers = np.arange(num_layers + 1)
    if num_chunks == 1:
        return layers[:, None]
    last = layers // num_chunks
    if head_layers:
        ideal = np.rint((layers + head_layers) / num_chunks - head_layers).astype(np.int64)
        last = np.minimum(np.maximum(ideal, 1), layers - num_chunks + 1)
    # The other chunks divide the rest.
    each, larger = np.divmod(layers - last, num_chunks - 1)
    others = [each + (chunk < larger) for chunk in range(num_chunks - 1)]
    return np.column_stack([*others, last])


def in_chunks(stages: Divisions, chunks: NDArray[np.int64]) -> Divisions:
    """Return divisions of the stages in chunks.

    Args:
        stages: shape [division, stage].
        chunks: of each number of layers on each stage, shape [stage, layers, chunk].
    Returns:
        Shape [division, virtual stage], in the order of the chain: all first chunks, all second.
    """
    found = chunks[np.arange(stages.shape[1]), stages]
    num_virtual = chunks.shape[0] * chunks.shape[2]
    return np.asarray(found.transpose(0, 2, 1).reshape(len(stages), num_virtual))


def moves(division: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the divisions with a layer moved to another stage or chunk."""
    for giver, taker in permutations(range(len(division)), 2):
        if division[giver] > 1:
            moved = list(division)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)


def climbed(
    division: NDArray[np.int64],
    start_s: float,
    bounds_s: Callable[[Divisions], NDArray[np.float64]],
) -> tuple[NDArray[np.int64], float]:
    """Move layers from chunk to chunk while that lowers the bound, always by the best of all moves.

    Args:
        division: of the layers of an interleaved case.
        start_s: its bound.
        bounds_s: gives the bounds of several divisions.

    Returns:
        The last division, and its bound.
    """
    while True:
        moved = np.array(list(moves(division.tolist())), dtype=np.int64)
        if not len(moved):
            return division, start_s
        found_s = bounds_s(moved)
        best = int(np.argmin(found_s))
        if not below(float(found_s[best]), start_s):
            return division, start_s
        division, start_s = moved[best], float(found_s[best])



def shortest_s(
    zero_s: NDArray[np.float64],
    each_s: NDArray[np.float64],
    num_layers: int,
    least: int,
    starts: Sequence[int] | NDArray[np.int64] = (0,),
) -> NDArray[np.float64]:
    """Return for each grid the least time in which the stages take all layers, as if layers could
    be cut.

    Args:
        zero_s, each_s: seconds without layers, and of each layer, [stage].
        num_layers: of the model.
        least: layers of each stage.
        starts: the first stage of each grid.
    """
    # All stages equally long: T = zero + each n for each, and the layers add up.
    slowness = np.add.reduceat(1 / each_s, starts)
    offset = np.add.reduceat(zero_s / each_s, starts)
    longest_s = np.maximum.reduceat(zero_s + least * each_s, starts)
    return np.asarray(np.maximum((num_layers + offset) / slowness, longest_s))
