"""Comparison of the weights of all holders of one element, bit by bit.

Holders add up one gradient and make one update: their weights stay equal to the last bit in all
steps. A difference of one bit is within every bound of rounding, and grows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from megatron_hetero.lab.verify.distance.measure import part_of
from megatron_hetero.lab.verify.processes.record import RankRecord


def first_unequal_holder(ranks: Sequence[RankRecord], steps: Sequence[int]) -> str | None:
    """Find the first weight that two ranks hold in unlike bits after a step; None if all agree.

    A rank in a precision of its own (`RankRecord.rounded`) has other bits rightly.
    """
    for step in steps:
        whole: dict[str, numpy.ndarray] = {}
        for rank, record in enumerate(ranks):
            for name, shard in record.shards.items():
                if name in record.rounded:
                    continue
                own = record.arrays[f"weight/{step}/{name}"]
                if name not in whole:
                    whole[name] = numpy.full(shard.global_shape, numpy.nan, "float32")
                # NaN marks elements that no rank before has held.
                held = part_of(whole[name], shard)
                known = ~numpy.isnan(held)
                if not numpy.array_equal(own[known], held[known]):
                    return f"{name}, step {step}, rank {rank}"
                fill(whole[name], record, name, own)
    return None


def fill(whole: numpy.ndarray, record: RankRecord, name: str, own: numpy.ndarray) -> None:
    """Write a rank's part `own` of a tensor to its place in the `whole`."""
    shard, offset = record.shards[name], 0
    # A shard is a run of intervals along one axis; its own elements follow each other.
    for start, stop in shard.intervals:
        place = (slice(None),) * shard.dim + (slice(start, stop),)
        local = (slice(None),) * shard.dim + (slice(offset, offset + stop - start),)
        whole[place] = own[local]
        offset += stop - start
