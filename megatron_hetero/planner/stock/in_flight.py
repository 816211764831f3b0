"""Micro-batches that stages of stock Megatron keep for their backward passes, and their memory."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.programme import Schedule

_PERIODS = 4
"""Groups of micro-batches after which interleaved stages have kept all that they ever keep."""


@lru_cache(maxsize=64)
def stock_schedule(num_stages: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """Return Megatron's own order of passes."""
    if num_chunks == 1:
        return one_f_one_b(num_stages, num_micro_batches)
    return interleaved(tuple(range(num_stages)) * num_chunks, num_micro_batches)


def num_in_flight(
    num_stages: int, p: int, num_chunks: int, num_micro_batches: int
) -> tuple[int, float]:
    """Return the micro-batches that stage `p` keeps in one piece at the peak, and a factor.

    The factor is 1 for a single chunk.  An interleaved stage keeps chunks of micro-batches
    (`get_pp_rank_microbatches`): the factor times as many as in one piece, with equal chunks.
    """
    # 1F1B: as many as there are stages from this one on.
    whole = min(num_stages - p, num_micro_batches)
    if num_chunks == 1:
        return whole, 1.0
    # Megatron's warm-up of interleaved stages, and the one in the steady state.
    chunks = 2 * (num_stages - p - 1) + (num_chunks - 1) * num_stages + 1
    return whole, min(chunks / num_chunks, num_micro_batches) / whole


def with_times_kept(memory: StageMemory, times: float, *, is_last: bool = False) -> StageMemory:
    """Return the memory of a stage that keeps so many times the activations; without the head of a
    last stage, which may be let go when most layers are kept."""
    if times == 1.0:
        return memory
    part = "activations"
    of_ends = 0 if is_last else int(times * memory.base[part])
    return replace(
        memory,
        base={**memory.base, part: of_ends},
        per_layer={**memory.per_layer, part: int(times * memory.per_layer[part])},
        kinds=(),
    )


def kept_chunks(
    num_stages: int, p: int, num_chunks: int, num_micro_batches: int
) -> NDArray[np.int64]:
    """Return the micro-batches that interleaved stage `p` keeps of each chunk before its backward
    passes, shape [moment, chunk]."""
    # More groups of micro-batches repeat what the first ones keep.
    return _kept_chunks(num_stages, num_chunks, min(num_micro_batches, _PERIODS * num_stages))[p]


@lru_cache(maxsize=64)
def _kept_chunks(
    num_stages: int, num_chunks: int, num_micro_batches: int
) -> list[NDArray[np.int64]]:
    """Return by stage what is kept of each chunk before backward passes, [moment, chunk]."""
    found = []
    for programme in stock_schedule(num_stages, num_chunks, num_micro_batches).programmes:
        counts, moments = [0] * num_chunks, set()
        for operation in (operation for instruction in programme for operation in instruction):
            if operation.kind == "forward":
                counts[operation.chunk] += 1
            elif operation.kind == "backward":
                moments.add(tuple(counts))
                counts[operation.chunk] -= 1
        found.append(np.array(sorted(moments), dtype=np.int64))
    return found
