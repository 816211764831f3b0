"""Initial weights of ranks, compared to the bit with those that one process draws."""

from __future__ import annotations

import numpy
import pytest

from megatron_hetero.lab.verify.distance.start import first_unequal_start
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.runtime.parallel.shards import ParameterShard

NAME = "decoder.layers.0.mlp.linear_fc2.weight"
WHOLE = numpy.arange(8, dtype="float32").reshape(2, 4)


def holder(start: int, stop: int, change: float = 0.0) -> RankRecord:
    """Return a rank with some columns of the tensor, whose last element may differ."""
    shard = ParameterShard(NAME, (2, 4), 1, ((start, stop),), True, False)
    own = WHOLE[:, start:stop].copy()
    own[-1, -1] += numpy.float32(change)
    return RankRecord({}, {NAME: shard}, {}, {}, [], drawn={NAME: own})


ONE = holder(0, 4)


@pytest.mark.parametrize("is_drawn_alike", [True, False])
def test_equal_shards_are_equal(is_drawn_alike: bool) -> None:
    ranks = [holder(0, 3), holder(3, 4), holder(0, 4)]
    assert first_unequal_start(ONE, ranks, is_drawn_alike) is None


@pytest.mark.parametrize("is_drawn_alike", [True, False])
def test_one_unit_in_the_last_place_is_found(is_drawn_alike: bool) -> None:
    ranks = [holder(0, 3), holder(3, 4), holder(0, 4, change=2.0**-20)]
    assert first_unequal_start(ONE, ranks, is_drawn_alike) == f"{NAME}, rank 2"


def test_ranks_that_agree_on_other_weights_are_found_beside_one_process() -> None:
    ranks = [holder(0, 4, change=1.0), holder(0, 4, change=1.0)]
    assert first_unequal_start(ONE, ranks, False) is None
    assert first_unequal_start(ONE, ranks, True) == f"{NAME}, rank 0"
