"""The deal that a fixed degree gives: what flexible groups are compared with.

All groups have one size, and sequences are packed best fit into as few inputs as fill their memory,
as training with a fixed context-parallel size does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hetero.sequences.deal.dealt import Deal, DealtGroup, MicroBatch, check_lengths
from megatron_hetero.sequences.deal.price_table import PriceTable, price_table
from megatron_hetero.sequences.tree import GroupTree


def static_deals(tree: GroupTree, lengths: Sequence[int]) -> dict[int, Deal]:
    """Deal a batch with every degree large enough for the longest sequence.

    The size of the inputs is the better of the longest sequence's and of what memory holds; inputs
    of about equal time share a micro-batch.

    Args:
        tree: the groups of the job, all of one size alike or not.
        lengths: of the sequences, in tokens.
    Returns:
        Deals by the number of ranks of each group.
    """
    check_lengths(tree, lengths)
    table = price_table(tree, lengths)
    found: dict[int, Deal] = {}
    for size in sorted({kind.size for kind in tree.kinds}):
        groups = [g for g in tree.groups if g.stop - g.first == size]
        # A degree counts only where its groups cover all ranks.
        if len(groups) * size != tree.num_ranks:
            continue
        # Inputs as full as memory allows, or only as full as the longest sequence.
        for full in (True, False):
            deal = _static(table, [tree.groups.index(g) for g in groups], full)
            if deal is not None and (size not in found or deal.seconds < found[size].seconds):
                found[size] = deal
    return found


def _static(table: PriceTable, groups: Sequence[int], full: bool) -> Deal | None:
    """Deal with these groups alone; None where one of them cannot hold the longest."""
    tree = table.tree
    options = [_option(table, tree.groups[g].kind) for g in groups]
    if any(option is None for option in options):
        return None
    chosen = [option for option in options if option is not None]
    if not np.isfinite(table.seconds[chosen]).all():
        return None
    # [sequence]: the part of memory in the group where it takes most, so that any group will do.
    part = table.fullest[chosen].max(axis=0)
    inputs = _best_fit(part, 1.0 if full else float(part.max()))
    worst = table.seconds[chosen].max(axis=0)
    # Inputs of like time share a micro-batch, because the slowest group sets its pace.
    inputs.sort(key=lambda own: (-float(worst[own].sum()), own))
    micro_batches = []
    for first in range(0, len(inputs), len(groups)):
        made = []
        for g, option, own in zip(
            groups, chosen, inputs[first : first + len(groups)], strict=False
        ):
            place = tree.groups[g]
            seconds = float(table.fixed_s[option] + table.seconds[option, own].sum())
            price = option - int(np.searchsorted(table.kind_of_option, place.kind))
            made.append(
                DealtGroup(place.first, place.stop, place.kind, price, tuple(sorted(own)), seconds)
            )
        micro_batches.append(MicroBatch(tuple(made), 0.0, "greedy", "fixed degree"))
    return Deal(tuple(micro_batches), 0.0, tree.num_ranks, tree.most_other_stages)


def _option(table: PriceTable, kind: int) -> int | None:
    """Return the option of a kind of group with the least seconds for all sequences, among options
    with enough memory."""
    own = np.flatnonzero(table.kind_of_option == kind)
    if not len(own):
        return None
    return int(own[np.argmin(table.seconds[own].sum(axis=1) + table.fixed_s[own])])


def _best_fit(parts: np.ndarray, room: float) -> list[list[int]]:
    """Pack best fit, the largest first: each into the fullest input that still has room."""
    inputs: list[list[int]] = []
    left: list[float] = []
    for k in np.argsort(-parts, kind="stable"):
        fitting = [i for i, space in enumerate(left) if parts[k] <= space + 1e-12]
        if fitting:
            at = min(fitting, key=lambda i: left[i])
            inputs[at].append(int(k))
            left[at] -= float(parts[k])
        else:
            inputs.append([int(k)])
            left.append(room - float(parts[k]))
    return inputs
