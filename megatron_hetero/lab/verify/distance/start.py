"""Comparison of the initial weights of all ranks of a plan.

All runs of a verification load one checkpoint. So this looks at the weights before, as every rank
drew them: the start of a job without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

from megatron_hetero.lab.verify.distance.holders import fill
from megatron_hetero.lab.verify.distance.measure import part_of
from megatron_hetero.lab.verify.processes.record import RankRecord

Rounding = Callable[[int, str, numpy.ndarray], numpy.ndarray]
"""(rank, parameter, the single process's whole value) -> the rank's value."""


def first_unequal_start(
    reference: RankRecord,
    ranks: Sequence[RankRecord],
    is_drawn_alike: bool,
    rounding: Rounding | None = None,
) -> str | None:
    """Find the first tensor of a rank with other initial weights than expected; None if all agree.

    Bits are compared: drawing is not arithmetic, and no division of the work may round it
    otherwise.

    Args:
        reference: the record of the one process.
        ranks: the records of the plan, by rank.
        is_drawn_alike: the ranks draw as the one process does. Otherwise they are compared with one
            another: holders of the same elements, replicas above all, start alike.
        rounding: what ranks in precisions of their own make of the one process's weights.
    """
    # The expected whole tensors: the one process's, or what the ranks before had.
    whole = dict(reference.drawn) if is_drawn_alike else {}
    for rank, record in enumerate(ranks):
        for name, shard in record.shards.items():
            if name not in record.drawn:
                continue
            if name not in whole:
                whole[name] = numpy.full(shard.global_shape, numpy.nan, "float32")
            # Compare this rank's part, as far as it is known.
            due = whole[name] if rounding is None else rounding(rank, name, whole[name])
            at = part_of(due, shard)
            own = record.drawn[name]
            known = ~numpy.isnan(at)
            if not numpy.array_equal(own[known], at[known]):
                return f"{name}, rank {rank}"
            # Later ranks with the same elements are compared with this one.
            if not is_drawn_alike:
                fill(whole[name], record, name, own)
    return None
