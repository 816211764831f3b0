"""Whether the ranks of a plan are built with the same initial weights.

All runs of a verification load one checkpoint, so what a job without one would start from is looked
at before: every rank's weights as they were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from megatron_hetero.lab.verify.distance.measure import part_of
from megatron_hetero.lab.verify.processes.record import RankRecord


def first_unequal_start(
    reference: RankRecord, ranks: Sequence[RankRecord], is_drawn_alike: bool
) -> str | None:
    """The first tensor of a rank that was built with other weights than it should; None: none.

    Bits are compared: drawing is not arithmetic that another division may round otherwise.

    Args:
        is_drawn_alike: the ranks draw as the one process does.  Otherwise they are compared with
            one another: holders of the same elements, replicas above all, start alike.
    """
    whole = dict(reference.drawn) if is_drawn_alike else {}
    for rank, record in enumerate(ranks):
        for name, shard in record.shards.items():
            if name not in record.drawn:
                continue
            if name not in whole:
                whole[name] = numpy.full(shard.global_shape, numpy.nan, "float32")
            at = part_of(whole[name], shard)
            own = record.drawn[name]
            known = ~numpy.isnan(at)
            if not numpy.array_equal(own[known], at[known]):
                return f"{name}, rank {rank}"
            if not is_drawn_alike:
                _fill(whole[name], record, name)
    return None


def _fill(whole: numpy.ndarray, record: RankRecord, name: str) -> None:
    shard, offset = record.shards[name], 0
    for start, stop in shard.intervals:
        place = (slice(None),) * shard.dim + (slice(start, stop),)
        local = (slice(None),) * shard.dim + (slice(offset, offset + stop - start),)
        whole[place] = record.drawn[name][local]
        offset += stop - start
