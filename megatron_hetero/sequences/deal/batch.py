"""The deal of a step: the batch cut into micro-batches, and each of these dealt.

As FlexSP does (arXiv 2412.01523, section 4.2), sequences are sorted by length and cut into runs of
about equal memory, so that those of a micro-batch are alike; several numbers of micro-batches are
tried, and the fastest deal is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_hetero.sequences.deal.dealt import Deal, MicroBatch, check_deal, check_lengths
from megatron_hetero.sequences.deal.greedy import greedy_parts
from megatron_hetero.sequences.deal.micro_batch import (
    deal_micro_batch,
    least_seconds,
    made_micro_batch,
    packing_of,
)
from megatron_hetero.sequences.deal.price_table import PriceTable, price_table
from megatron_hetero.sequences.price.group_price import Floats
from megatron_hetero.sequences.tree import GroupTree, step_seconds

_FULLER = (1.02, 1.1)
"""Parts of memory, over the mean, after which a micro-batch takes no more sequences."""
NO_SEARCH_WAS_FASTER = "no search was faster"
"""The reason for a greedy deal when nothing failed."""
_PROMISING = 1.03
_CLOSE = 1.01
_ENOUGH = 1.01
"""A step so close to its bound is not searched further: no more than this can be gained."""
_WORTH = 0.999
"""Micro-batches are searched again where evening them gains so much."""
_MAX_SEARCHES = 3
_MAX_MOVES = 400

type _Known = dict[tuple[int, ...], MicroBatch | None]
_MOST_MORE = 8
_MOST_ROUNDS = 8
"""Micro-batches over `other_stages`, at most: these add no more than an eighth then."""


def deal_batch(tree: GroupTree, lengths: Sequence[int], names: Sequence[str] | None = None) -> Deal:
    """Deal the sequences of a step to groups, so that all are done soonest.

    The same sequences on the same groups are always dealt alike.

    Args:
        tree: the groups of the job.
        lengths: of the sequences, in tokens.
        names: of their documents, for messages; None is "sequence 0" and so on.
    Raises:
        InfeasiblePlanError: a sequence is longer than any group can hold.
        PlanFormatError: there are no sequences, or an empty one.
    """
    check_lengths(tree, lengths, names)
    # Prices of every sequence on every kind of group.
    table = price_table(tree, lengths)
    seconds = partial(_seconds, table)
    fewest = fewest_micro_batches(table)
    best = _filled(table)
    known: _Known = {}
    # Try numbers of micro-batches, while a larger number may still be faster.
    candidates: dict[int, list[MicroBatch]] = {}
    tried = 0
    # Numbers rise, and `least_of_batch` holds for all larger ones too.
    for number in _numbers(fewest, len(lengths), tree.most_other_stages):
        is_enough = not tree.most_other_stages and number > fewest + 1
        # Without pipelines two numbers are enough: a further one only adds fixed seconds.
        if tried and (is_enough or least_of_batch(table, number) >= seconds(best)):
            break
        # The part of all memory that each micro-batch fills on average.
        level = float(table.ranks_filled.sum()) / table.tree.num_ranks / number
        # Cut the batch by memory at several levels, and into runs of equal numbers.
        cuts = [_filled_parts(table, min(1.0, fuller * level)) for fuller in _FULLER]
        for parts in (*cuts, runs(table, number)):
            found = _dealt(table, parts, seconds(best) * _PROMISING, known)
            if found is None:
                continue
            tried += 1
            # Of one number of micro-batches the best cut is a candidate.
            evened = _evened(table, found)
            candidates[number] = min(candidates.get(number, evened), evened, key=seconds)
            best = min(best, evened, key=seconds)
    # Search the best few more closely.
    close = [c for c in candidates.values() if seconds(c) < seconds(best) * _CLOSE]
    # Of equal ones that with the sharper bound.
    best = min([*(_searched(table, c) for c in close), best], key=seconds)
    if tree.most_other_stages:
        # Neighbours in a pipeline are then about as long; `step_seconds` relies on it.
        best.sort(key=lambda m: m.seconds)
    # The bound of the whole step, and a proof that the deal is one.
    least_s = least_of_batch(table, fewest)
    deal = Deal(tuple(best), least_s, tree.num_ranks, tree.most_other_stages)
    check_deal(tree, lengths, deal)
    return deal


def greedy_deal(tree: GroupTree, lengths: Sequence[int], reason: str) -> Deal:
    """Deal without the solver; `reason` says why.

    Args:
        tree: the groups of the job.
        lengths: of the sequences, in tokens.
        reason: for the log.
    Raises:
        InfeasiblePlanError: a sequence is longer than any group can hold.
    """
    check_lengths(tree, lengths)
    table = price_table(tree, lengths)
    made = tuple(replace(m, reason=reason) for m in _filled(table))
    least_s = least_of_batch(table, fewest_micro_batches(table))
    return Deal(made, least_s, tree.num_ranks, tree.most_other_stages)


def _numbers(fewest: int, most: int, other_stages: float) -> list[int]:
    """Return the numbers of micro-batches to try.  Pipelines fill and drain faster with more and
    shorter ones, until each has its fixed seconds once too often.

    Args:
        fewest: that memory could allow.
        most: there are not more sequences.
        other_stages: as in `step_seconds`.
    """
    more = [fewest + i for i in range(_MOST_MORE + 1)]
    if other_stages:
        # Doubling, because pipelines want many micro-batches, and each number costs a search.
        more = [*more[:2], *(fewest << i for i in range(1, 31))]
        more = [n for n in more if n <= max(fewest + 1, _MOST_ROUNDS * other_stages)]
    return sorted({n for n in more if n <= most})


def fewest_micro_batches(table: PriceTable) -> int:
    """Return the least number of micro-batches that memory could allow: what the sequences need at
    their leanest, over what all ranks have."""
    return max(1, int(np.ceil(float(table.ranks_filled.sum()) / table.tree.num_ranks - 1e-9)))


def least_of_batch(table: PriceTable, number: int) -> float:
    """Return what no deal in `number` or more micro-batches, cut in any way, is faster than: each
    has its fixed seconds, and all ranks' seconds are divided evenly; the longest is in one."""
    fixed_s = float(table.fixed_s.min())
    level = number * fixed_s + float(table.rank_seconds.sum()) / table.tree.num_ranks
    alone = float((table.seconds + table.fixed_s[:, None]).min(axis=0).max())
    return max(level, alone + (number - 1) * fixed_s)


def runs(table: PriceTable, number: int) -> list[list[int]]:
    """Cut the sequences, the longest first, into `number` runs of which the fullest fills the
    least memory.

    Args:
        table: prices of the batch.
        number: of runs, at most as many as sequences.
    """
    order = np.argsort(-table.lengths, kind="stable")
    filled = table.ranks_filled[order]
    # The fullest run holds the fullest sequence and the mean at least, and everything at most.
    low, high = float(max(filled.max(), filled.sum() / number)), float(filled.sum())
    # Halving forty times leaves nothing of the interval in double precision.
    for _ in range(40):
        middle = (low + high) / 2
        if len(_cut(filled, middle)) > number:
            low = middle
        else:
            high = middle
    cuts = _cut(filled, high)
    while len(cuts) < number:
        # Fewer were enough: the run with the most sequences is halved.
        widest = max(range(len(cuts)), key=lambda i: cuts[i][1] - cuts[i][0])
        first, stop = cuts[widest]
        cuts[widest : widest + 1] = [(first, (first + stop) // 2), ((first + stop) // 2, stop)]
    return [[int(k) for k in order[first:stop]] for first, stop in cuts]


def _cut(filled: Floats, most: float) -> list[tuple[int, int]]:
    """Cut greedily: each run as long as it can be."""
    cuts, first, total = [], 0, 0.0
    for i, part in enumerate(filled):
        if i > first and total + part > most * (1 + 1e-12):
            cuts.append((first, i))
            first, total = i, 0.0
        total += float(part)
    cuts.append((first, len(filled)))
    return cuts


def _filled_parts(table: PriceTable, fill: float) -> list[list[int]]:
    """Cut the batch as the greedy deal does."""
    return [part for _, part in greedy_parts(table, range(len(table.lengths)), fill)]


def _filled(table: PriceTable) -> list[MicroBatch]:
    """Deal greedily, which needs no solver."""
    made = []
    for packing, part in greedy_parts(table, range(len(table.lengths))):
        packing.improve(0.0)
        bound_s = least_seconds(table.of(part))
        made.append(made_micro_batch(packing, part, bound_s, NO_SEARCH_WAS_FASTER))
    return made


def _dealt(
    table: PriceTable, parts: Sequence[Sequence[int]], limit_s: float, known: _Known
) -> list[MicroBatch] | None:
    """Deal each run quickly; None where one does not fit into one micro-batch, or all together
    cannot be done within `limit_s`.

    Args:
        table: prices of the batch.
        parts: the runs.
        limit_s: of all together.
        known: deals of runs that were dealt before; new ones are added.
    """
    keys = [tuple(sorted(part)) for part in parts]
    # A bound for each run still ahead, so that a hopeless cut ends early.
    least = [least_seconds(table.of(part)) for part in parts]
    # A run that is known not to fit makes the whole cut impossible.
    for key in keys:
        if key in known and known[key] is None:
            return None
    found: list[MicroBatch] = []
    for number, key in enumerate(keys):
        if _seconds(table, found) + sum(least[number:]) >= limit_s:
            return None
        if key not in known:
            known[key] = deal_micro_batch(table, key, quick=True)
        micro_batch = known[key]
        if micro_batch is None:
            return None
        found.append(micro_batch)
    return found


def _evened(table: PriceTable, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Move and exchange sequences between micro-batches while that lowers the sum of seconds.
    Those that keep their sequences keep their bounds."""
    packing = packing_of(table, micro_batches)
    packing.improve(0.0, _MAX_MOVES)
    bounds = {m.sequences: m.bound_s for m in micro_batches}
    made = []
    for number in range(len(micro_batches)):
        own = np.flatnonzero(packing.micro_batch[packing.group_of] == number)
        # A micro-batch that gave all of its sequences away is gone.
        if len(own):
            numbers = [int(k) for k in own]
            # Equal sequences have an equal bound; it need not be proved again.
            bound_s = bounds.get(tuple(numbers))
            if bound_s is None:
                bound_s = least_seconds(table.of(numbers))
            of = packing.only(number, numbers)
            made.append(made_micro_batch(of, numbers, bound_s, ""))
    return made


def _searched(table: PriceTable, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Deal micro-batches again with all effort, starting from the present deals: the largest
    possible gain first, until all are close to the bound. Then even the deals again, and repeat
    while worthwhile."""
    seconds = partial(_seconds, table)
    found = list(micro_batches)
    for _ in range(_MAX_SEARCHES):
        # The largest distance to the bound first: there the search may gain most.
        may_gain = np.array([m.seconds - m.bound_s for m in found])
        for number in np.argsort(-may_gain, kind="stable"):
            bounds = [m.bound_s for m in found]
            if seconds(found) <= step_seconds(bounds, table.tree.most_other_stages) * _ENOUGH:
                break
            own = found[number]
            found[number] = deal_micro_batch(table, own.sequences, own) or own
        evened = _evened(table, found)
        if seconds(evened) > seconds(found) * _WORTH:
            break
        found = evened
    return found


def _seconds(table: PriceTable, micro_batches: Sequence[MicroBatch]) -> float:
    return step_seconds([m.seconds for m in micro_batches], table.tree.most_other_stages)
