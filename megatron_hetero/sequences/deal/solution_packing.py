"""Sequences packed as a solution of the aggregated programme says.

The programme says how many groups of each kind there are and how many sequences each kind takes;
here every sequence gets a group, within memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from megatron_hetero.sequences.deal.buckets import Buckets
from megatron_hetero.sequences.deal.packing import PackedGroups
from megatron_hetero.sequences.deal.price_table import PriceTable
from megatron_hetero.sequences.price.group_price import Floats

_LATER = 0.01
"""Part of the time by which packing may be late, before sequences are moved."""


def packed(
    table: PriceTable,
    buckets: Buckets,
    num_groups: npt.NDArray[np.int64],
    dealt: Floats,
    seconds: float,
) -> PackedGroups | None:
    """Pack sequences as a solution of the aggregated programme says.

    First each goes to the group that is done first with it; where memory does not allow that, to
    the fullest that holds it and is done in time.

    Args:
        table: prices of the sequences.
        buckets: of the same sequences.
        num_groups: groups of each option.
        dealt: sequences of each bucket that each option takes, shape [option, bucket], not rounded.
        seconds: for which the programme was solved.
    Returns:
        None where memory did not allow it.
    """
    # The groups of the solution, option by option.
    # [group] -> its option.
    options = np.repeat(np.arange(len(num_groups)), num_groups)
    if not len(options):
        return None
    # The option that each sequence is wished on.
    wished = np.full(len(table.lengths), -1, dtype=np.int64)
    for q, members in enumerate(buckets.members):
        counts = _whole(dealt[:, q], len(members))
        # The longest of a bucket to the largest groups.
        order = np.argsort(-table.size_of_option, kind="stable")
        wished[members] = np.repeat(order, counts[order])
    # Pack from the most expensive sequence down; where memory forbids it, allow more time.
    groups_of = {int(option): np.flatnonzero(options == option) for option in np.unique(options)}
    order = np.argsort(-table.rank_seconds, kind="stable")
    # To the group that is done first; to the fullest that is done in time; to the fullest.
    for in_time_s in (None, seconds * (1 + _LATER), float("inf")):
        packing = PackedGroups(table, [int(option) for option in options])
        if _pack(packing, order, wished, groups_of, in_time_s):
            return packing
    return None


def _pack(
    packing: PackedGroups,
    order: npt.NDArray[np.int64],
    wished: npt.NDArray[np.int64],
    groups_of: Mapping[int, npt.NDArray[np.int64]],
    in_time_s: float | None,
) -> bool:
    """Place all sequences; False where some group has no room for the rest."""
    everywhere = np.arange(len(packing.options))
    # Sequences without room on their wished option go wherever there is room.
    late = []
    for sequence in order:
        among = groups_of.get(int(wished[sequence]), everywhere[:0])
        if not packing.place(int(sequence), among, in_time_s):
            late.append(int(sequence))
    return all(
        packing.place(k, everywhere, in_time_s) or packing.place(k, everywhere) for k in late
    )


def _whole(parts: Floats, total: int) -> npt.NDArray[np.int64]:
    """Round parts to whole numbers of the same sum: the largest remainders up."""
    counts = np.floor(parts + 1e-6).astype(np.int64)
    missing = total - int(counts.sum())
    if missing > 0:
        order = np.argsort(-(parts - counts), kind="stable")
        counts[order[:missing]] += 1
    # Parts of a solver may add up to more than there are, by its tolerance.
    while counts.sum() > total:
        counts[int(np.argmax(counts))] -= 1
    return counts
