"""Sequences of nearly equal length counted together, to keep programmes small.

A bucket stands for each of its sequences by the shortest of them, so what is true of all deals of
the buckets is a bound for the sequences.  Long ones stay alone: what the buckets leave out is at
most a part `_LOSS` of all seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hetero.sequences.deal.price_table import PriceTable

_LOSS = 0.002
_NUM_BUCKETS = 40


@dataclass(frozen=True)
class Buckets:
    """`members[q]` are the sequences of bucket q, the longest first; `table` prices the shortest of
    each bucket."""

    table: PriceTable
    members: tuple[npt.NDArray[np.int64], ...]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """Return the number of sequences of each bucket, shape [bucket]."""
        return np.array([float(len(m)) for m in self.members])


def bucketed(table: PriceTable) -> Buckets:
    """Sort the sequences of a table into buckets, the longest sequences first.

    Greedy from the long end: a bucket ends where what it leaves out would pass an equal part of
    what all may leave out.
    """
    order = np.argsort(-table.lengths, kind="stable")
    work = table.rank_seconds[order]
    allowed = _LOSS * float(work.sum()) / _NUM_BUCKETS
    members: list[list[int]] = []
    total = 0.0
    # What a bucket leaves out: each member's seconds beyond those of its shortest member.
    for position, sequence in enumerate(order):
        total += float(work[position])
        if members and total - (len(members[-1]) + 1) * float(work[position]) <= allowed:
            members[-1].append(int(sequence))
        else:
            members.append([int(sequence)])
            total = float(work[position])
    # Members come from long to short, so that the last one is the shortest.
    shortest = [bucket[-1] for bucket in members]
    return Buckets(table.of(shortest), tuple(np.array(bucket) for bucket in members))
