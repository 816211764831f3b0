"""Weights of all holders: one bit is enough."""

from __future__ import annotations

import numpy

from megatron_hetero.lab.verify.distance.holders import first_unequal_holder
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.runtime.parallel.shards import ParameterShard


def record(values: numpy.ndarray, start: int, stop: int) -> RankRecord:
    shard = ParameterShard("w", (8,), 0, ((start, stop),), True, False)
    return RankRecord({"weight/1/w": values[start:stop].copy()}, {"w": shard}, {}, {}, [])


def test_a_bit_in_the_part_that_two_ranks_hold() -> None:
    whole = numpy.random.default_rng(0).normal(size=8).astype("float32")
    ranks = [record(whole, 0, 4), record(whole, 4, 8), record(whole, 2, 8)]
    assert first_unequal_holder(ranks, [1]) is None
    part = ranks[2].arrays["weight/1/w"]
    part[-1] = numpy.nextafter(part[-1], numpy.float32(1))
    assert first_unequal_holder(ranks, [1]) == "w, step 1, rank 2"
    ranks[2].rounded["w"] = "torch.bfloat16"
    assert first_unequal_holder(ranks, [1]) is None
