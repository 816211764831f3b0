"""The deal that needs no solver: longest sequences first, each to the smallest group that holds it.

It is valid wherever every sequence fits on some group, and what the search falls back to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hetero.sequences.deal.packing import PackedGroups
from megatron_hetero.sequences.deal.price_table import PriceTable


def greedy_parts(
    table: PriceTable, sequences: Sequence[int], fill: float = 1.0
) -> list[tuple[PackedGroups, list[int]]]:
    """Deal sequences, to as many micro-batches as memory asks for.

    Each sequence opens a group of the kind that takes the fewest seconds of ranks for it, while
    there are ranks left; then it joins the group that is done first with it; where no group has
    room it waits for the next micro-batch.

    Args:
        table: prices of the batch.
        sequences: numbers of those to deal.
        fill: part of all memory after which a micro-batch takes no more.
    Returns:
        For each micro-batch its groups with their sequences, not improved, and which of `table`
        these are.
    """
    order = np.argsort(-table.lengths[np.asarray(sequences, dtype=np.int64)], kind="stable")
    waiting = [sequences[int(i)] for i in order]
    found = []
    while waiting:
        packing, taken = _micro_batch(table.of(waiting), fill * table.tree.num_ranks)
        found.append((packing, [waiting[i] for i in taken]))
        rest = set(range(len(waiting))) - set(taken)
        waiting = [waiting[i] for i in sorted(rest)]
    return found


def _micro_batch(table: PriceTable, most_ranks: float) -> tuple[PackedGroups, list[int]]:
    """Fill a micro-batch from sequences sorted from long to short, up to the memory of `most_ranks`
    ranks."""
    tree = table.tree
    counts = [0] * len(tree.kinds)
    options: list[int] = []
    used_up = set[int]()
    # Options of each sequence, the cheapest in seconds of ranks first.
    price = table.seconds * table.size_of_option[:, None]
    orders = np.argsort(price, axis=0, kind="stable")
    # One group for each sequence from the longest, while ranks are left.
    for sequence in range(len(table.lengths)):
        for option in orders[:, sequence]:
            # Kinds that the ranks have no room for stay out of the question: `counts` only grows.
            kind = int(table.kind_of_option[option])
            if kind in used_up or not np.isfinite(table.seconds[option, sequence]):
                continue
            counts[kind] += 1
            if tree.has_room(counts):
                options.append(int(option))
                break
            counts[kind] -= 1
            used_up.add(kind)
        # Every rank has a group: no further one can be opened.
        if tree.num_ranks <= sum(k.size * c for k, c in zip(tree.kinds, counts, strict=True)):
            break
    # Then fill these groups with as many sequences as memory allows.
    packing = PackedGroups(table, options)
    everywhere = np.arange(len(options))
    taken, filled = list[int](), 0.0
    for s, part in enumerate(table.ranks_filled):
        # The first sequence is taken even if it alone fills more than the level.
        if (not taken or filled + part <= most_ranks) and packing.place(s, everywhere):
            taken.append(s)
            filled += float(part)
    # Groups are numbered by the sequences that are in it.
    only = PackedGroups(table.of(taken), options)
    for position, sequence in enumerate(taken):
        only.put(position, int(packing.group_of[sequence]))
    return only, taken
