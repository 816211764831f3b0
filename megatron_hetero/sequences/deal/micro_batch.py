"""The deal of one micro-batch: the aggregated search, with its bound.

A time at which the aggregated programme has no solution is a lower bound.  Bisection finds the
least time at which its relaxation has one; a little above, the programme's solutions are packed,
and the best packing is the deal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hetero.sequences.deal.buckets import Buckets, bucketed
from megatron_hetero.sequences.deal.dealt import DealtGroup, MicroBatch
from megatron_hetero.sequences.deal.greedy import greedy_parts
from megatron_hetero.sequences.deal.packing import PackedGroups
from megatron_hetero.sequences.deal.patterns import PatternProgramme, patterns_within
from megatron_hetero.sequences.deal.price_table import PriceTable
from megatron_hetero.sequences.deal.programme import Programme
from megatron_hetero.sequences.deal.solution_packing import packed

ENOUGH = 0.008
"""A deal so little above its bound is not improved further."""
_BISECTED = 0.006
_QUICKLY = 0.015
_EXACT = 0.001
_MAX_BISECTIONS = 10
_ABOVE = (0.006, 0.015, 0.03)
_MAX_PACKED = 6
_ROOMS = (1.0, 0.96, 0.92)


def least_seconds(table: PriceTable) -> float:
    """Return a bound that needs no solver: the sequence that takes longest on its best group, and
    all ranks' seconds divided evenly."""
    alone = (table.seconds + table.fixed_s[:, None]).min(axis=0)
    level = float(table.rank_seconds.sum()) / table.tree.num_ranks + float(table.fixed_s.min())
    return max(float(alone.max()), level)


@dataclass
class _PackingSearch:
    """The best packing so far, and the bound."""

    table: PriceTable
    buckets: Buckets
    low_s: float
    quick: bool = False
    best: PackedGroups | None = None
    reason: str = ""

    @property
    def best_s(self) -> float:
        """Return the seconds of the best packing."""
        return float("inf") if self.best is None else self.best.busiest_s

    @property
    def is_enough(self) -> bool:
        """Return whether the best packing is close to the bound."""
        return self.best_s <= self.low_s * (1 + ENOUGH)

    def offer(self, packing: PackedGroups | None) -> None:
        """Keep a packing if it is the best, improved."""
        if packing is None:
            return
        packing.improve(self.low_s * (1 + ENOUGH / 4))
        if packing.busiest_s < self.best_s:
            self.best = packing


def deal_micro_batch(
    table: PriceTable,
    sequences: Sequence[int],
    start: MicroBatch | None = None,
    *,
    quick: bool = False,
) -> MicroBatch | None:
    """Deal some sequences of a batch in one micro-batch.

    Args:
        table: prices of the batch.
        sequences: numbers in the batch.
        start: a deal of the same sequences to begin with; None is the greedy one.
        quick: with less effort, and a weaker bound.
    Returns:
        None where they do not fit in one micro-batch, as far as is known.
    """
    # Begin with a deal that is known.
    own = table.of(sequences)
    search = _PackingSearch(own, bucketed(own), least_seconds(own), quick)
    if start is not None:
        search.offer(packing_of(table, [start]).of(sequences))
    else:
        greedy = greedy_parts(own, range(len(sequences)))
        if len(greedy) == 1:
            packing, order = greedy[0]
            search.offer(packing.of([order.index(k) for k in range(len(order))]))
    before = search.best
    # The programme first; patterns where it finds nothing, or leaves a gap.
    if not search.is_enough:
        _by_programme(search)
        if not quick and search.best is None:
            _fit_by_patterns(search)
        if not quick and search.best is not None and search.best_s > search.low_s * (1 + _BISECTED):
            _by_patterns(search)
    # Say why it is still the greedy deal.
    if search.best is None:
        return None
    is_greedy = search.best is before and bool(search.reason)
    return made_micro_batch(
        search.best,
        sequences,
        min(search.low_s, search.best_s),
        search.reason if is_greedy else "",
    )


def packing_of(table: PriceTable, micro_batches: Sequence[MicroBatch]) -> PackedGroups:
    """Return the groups of micro-batches with their sequences, all together.

    Args:
        table: prices of the batch.
        micro_batches: some, or all, of the batch.
    """
    groups = [(i, group) for i, m in enumerate(micro_batches) for group in m.groups]
    first_option = np.searchsorted(table.kind_of_option, np.arange(len(table.tree.kinds)))
    packing = PackedGroups(
        table,
        [int(first_option[group.kind]) + group.price for _, group in groups],
        [i for i, _ in groups],
    )
    for number, (_, group) in enumerate(groups):
        for sequence in group.sequences:
            packing.put(sequence, number)
    return packing


def _by_programme(search: _PackingSearch) -> None:
    """Raise the bound by bisection, and pack the programme's solutions a little above it."""
    programme = Programme(search.buckets)
    # Without a deal so far, begin at the longest time that is possible.
    high_s = search.best_s
    if not np.isfinite(high_s):
        high_s = _longest_s(search.table)
        if programme.solve(high_s).answer == "impossible":
            return
    # The relaxation is solved fastest, and refuses almost as much as whole numbers do.
    _bisect(search, programme, high_s)
    # Pack solutions a little above the bound, with more room if none fits.
    # `step` grows where a trial above the bound is still impossible, and so raises the bound.
    step = 1.0
    for room in _ROOMS:
        packings, tried = 0, 0
        while (
            packings < (1 if search.quick else len(_ABOVE))
            and tried < _MAX_PACKED
            and not search.is_enough
        ):
            trial_s = search.low_s * (1 + step * _ABOVE[packings])
            solution = programme.solve(trial_s, room, "all")
            tried += 1
            # With less room than there is, "impossible" proves nothing.
            if solution.answer == "impossible" and room == 1.0:
                search.low_s = min(trial_s, search.best_s)
                step *= 2
                continue
            packings += 1
            if solution.num_groups is None or solution.dealt is None:
                search.reason = f"the solver gave no deal within {trial_s:.4g} s"
                continue
            search.offer(
                packed(search.table, search.buckets, solution.num_groups, solution.dealt, trial_s)
            )
        if search.best is not None:
            return


def _bisect(search: _PackingSearch, programme: Programme, high_s: float) -> None:
    """Raise the bound by bisection below `high_s`, a time that is enough."""
    trial_s = search.low_s
    for _ in range(_MAX_BISECTIONS):
        if programme.solve(trial_s, whole="nothing").answer == "impossible":
            search.low_s = trial_s
        else:
            # Without an answer the bound stays what is proved.
            high_s = trial_s
        if high_s <= search.low_s * (1 + (_QUICKLY if search.quick else _BISECTED)):
            break
        # The geometric mean leaves the square root of the ratio of both ends.
        trial_s = (search.low_s * high_s) ** 0.5


def _longest_s(table: PriceTable) -> float:
    """Return the seconds of all sequences in a row on the slowest groups with enough memory: in so
    much time only memory is a limit."""
    seconds = np.where(np.isfinite(table.seconds), table.seconds, 0.0)
    return float(table.fixed_s.max() + seconds.max(axis=0).sum())


def _fit_by_patterns(search: _PackingSearch) -> None:
    """Find any deal where memory is so tight that no solution of the programme could be packed."""
    longest_s = _longest_s(search.table)
    patterns = patterns_within(search.table, longest_s)
    if patterns is not None:
        search.offer(PatternProgramme(search.table, patterns).solve(longest_s)[1])


def _by_patterns(search: _PackingSearch) -> None:
    """Raise the bound, and find better deals, by patterns where there are few sequences."""
    # All patterns of sequences on a group within the best time.
    patterns = patterns_within(search.table, search.best_s * (1 - 1e-9))
    if patterns is None:
        return
    programme = PatternProgramme(search.table, patterns)
    # Without all patterns whole there is no list of times to bisect over.
    times = programme.times
    if times is None:
        _raise_bound(search, programme)
        return
    times = times[times >= search.low_s * (1 - 1e-12)]
    # No deal lies between two neighbouring times; times[low] is too little, the next may be enough.
    low, high = -1, len(times)
    # Bisect over the times that a pattern can take.
    middle = high - 1
    # `low` is impossible and `high` is enough, at every pass.
    while high - low > 1:
        answer, packing = programme.solve(float(times[middle]))
        if answer == "unknown":
            return
        if answer == "impossible":
            low = middle
            # Between two neighbouring times there is no deal: the bound rises to the next one.
            beyond = float(times[low + 1]) if low + 1 < len(times) else search.best_s
            search.low_s = max(search.low_s, min(beyond, search.best_s))
        else:
            high = middle
            if packing is not None and packing.busiest_s < search.best_s:
                search.best = packing
            if low >= 0 and times[high] <= times[low + 1] * (1 + _EXACT):
                return
        middle = (low + high) // 2


def _raise_bound(search: _PackingSearch, programme: PatternProgramme) -> None:
    """Raise the bound by bisection up to the best deal, and keep better ones."""
    # Most often nothing is gained, which a trial a little above the bound shows at once.
    high_s, trial_s = search.best_s, search.low_s * (1 + _BISECTED / 2)
    for _ in range(_MAX_BISECTIONS):
        if trial_s >= search.best_s:
            return
        answer, packing = programme.solve(trial_s)
        search.offer(packing)
        if answer == "impossible":
            search.low_s = trial_s
        else:
            high_s = min(trial_s, search.best_s)
        if high_s <= search.low_s * (1 + _BISECTED):
            return
        trial_s = min((search.low_s * high_s) ** 0.5, search.best_s * (1 - _EXACT))


def made_micro_batch(
    packing: PackedGroups, sequences: Sequence[int], bound_s: float, reason: str
) -> MicroBatch:
    """Put the groups of a packing on ranks.

    Args:
        packing: of the sequences.
        sequences: their numbers in the batch.
        bound_s: that no deal of them is faster than.
        reason: why this is the greedy deal; empty where it is not.
    """
    # Groups that hold anything, by kind.
    table, tree = packing.table, packing.table.tree
    used = [g for g in range(len(packing.options)) if len(packing.members(g))]
    counts = [0] * len(tree.kinds)
    for g in used:
        counts[int(table.kind_of_option[packing.options[g]])] += 1
    # Places for them on the ranks.
    placed = tree.placed(counts)
    if placed is None:
        raise RuntimeError("the packing has groups that the ranks cannot form")
    first_option = np.searchsorted(table.kind_of_option, np.arange(len(tree.kinds)))
    # Each group with its ranks, sequences and seconds.
    groups = []
    for g in used:
        option = int(packing.options[g])
        kind = int(table.kind_of_option[option])
        place = tree.groups[placed[kind].pop(0)]
        own = packing.members(g)
        seconds = float(table.fixed_s[option] + table.seconds[option, own].sum())
        numbers = tuple(sorted(int(sequences[int(k)]) for k in own))
        price = option - int(first_option[kind])
        groups.append(DealtGroup(place.first, place.stop, kind, price, numbers, seconds))
    groups.sort(key=lambda group: group.first)
    return MicroBatch(tuple(groups), bound_s, "greedy" if reason else "search", reason)
