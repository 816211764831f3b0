"""The programme of few sequences: every set of them that one group could take is an unknown.

Where a micro-batch holds few, long sequences, the aggregated programme cannot see that they do not
divide evenly.  Here its unknowns are the sets ("patterns") themselves, as in cutting stock
(Gilmore and Gomory 1961), so that the bound is almost always exact, and a whole solution is a deal.
Where a kind of group could take too many sets, only the longest sequences are in patterns, and the
shorter ones, of which each matters less, fill in parts what these leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, hstack

from megatron_hetero.sequences.deal.packing import PackedGroups
from megatron_hetero.sequences.deal.price_table import PriceTable
from megatron_hetero.sequences.deal.programme import Answer, counted, nest_rows
from megatron_hetero.sequences.price.group_price import Floats

MAX_SEQUENCES = 80
_MAX_OF_OPTION = 2_500
_MAX_PATTERNS = 6_000
_MAX_WHOLE = 1_500
"""With more patterns they are used in parts: the bound is weaker, and there is no deal."""
_NODE_LIMIT = 200
_INFEASIBLE = 2

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Patterns:
    """Sets that some group takes within a time: the option of each, shape [pattern]; its seconds;
    and which sequences are in it, shape [pattern, sequence].

    `loose`: sequences that are in no pattern of an option, shape [option, sequence]; its groups
    take them in parts, beside a pattern or (the empty one) without.
    """

    option: Ints
    seconds: Floats
    members: Bools
    loose: Bools


def patterns_within(table: PriceTable, seconds: float) -> Patterns | None:
    """Find the sets of sequences that a group of each option does in `seconds`; None where there
    are too many sequences."""
    num_options, num_sequences = table.seconds.shape
    if num_sequences > MAX_SEQUENCES:
        return None
    # An empty part, so that there is something to join where no option has a set.
    found = [(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, num_sequences), dtype=bool))]
    loose = np.zeros((num_options, num_sequences), dtype=bool)
    left = _MAX_PATTERNS
    longest_first = np.argsort(-table.rank_seconds, kind="stable")
    # Small groups take few sequences each.
    for option in np.argsort(table.size_of_option, kind="stable"):
        most = min(left, _MAX_OF_OPTION)
        sets, count = _most_sets(table, int(option), seconds, longest_first, most)
        loose[option, longest_first[count:]] = True
        # All options share the limit of patterns.
        left -= len(sets[0])
        found.append((np.full(len(sets[0]), option), *sets))
    options, times, members = (np.concatenate(part) for part in zip(*found, strict=True))
    return Patterns(options, times, members, loose)


def _most_sets(
    table: PriceTable, option: int, seconds: float, order: Ints, most: int
) -> tuple[tuple[Floats, Bools], int]:
    """Find the sets of an option among as many of the first sequences as have at most `most`.

    Args:
        table: prices of the sequences.
        option: number of the option.
        seconds: in which a set is done.
        order: of the sequences.
        most: number of sets.
    Returns:
        Seconds and members of each set, the empty one too where not all sequences are in sets; and
        how many are.
    """
    # All sequences, if their sets are few enough.
    found = _sets(table, option, seconds, order, most)
    if found is not None:
        return found, len(order)
    # Otherwise bisect the number of sequences taken.
    low, high = 0, len(order)
    best = _sets(table, option, seconds, order[:0], most)
    # `low` sequences have few enough sets, `high` have too many.
    while high - low > 1:
        middle = (low + high) // 2
        sets = _sets(table, option, seconds, order[:middle], most)
        low, high = (middle, high) if sets is not None else (low, middle)
        best = sets if sets is not None else best
    times, members = best if best is not None else (np.zeros(0), np.zeros((0, len(order)), bool))
    # Groups with only loose sequences use the empty set.
    nothing = np.zeros((1, members.shape[1]), dtype=bool)
    with_nothing = np.r_[times, table.fixed_s[option]], np.concatenate([members, nothing])
    return with_nothing, low


def _sets(
    table: PriceTable, option: int, seconds: float, among: Ints, most: int
) -> tuple[Floats, Bools] | None:
    """Find seconds and members of all sets of one option; None where they are more than `most`."""
    num_sequences = len(table.lengths)
    rows = table.rows[option]
    # Memory and seconds of each sequence on the option.
    need, room = table.memory[rows][:, among], table.room[rows] * (1 + 1e-9)
    takes = table.seconds[option, among]
    # The frontier: sets of one size, each with its seconds, memory and last sequence.
    time, used = np.array([table.fixed_s[option]]), np.zeros((1, len(room)))
    last, members = np.array([-1]), np.zeros((1, num_sequences), dtype=bool)
    times, sets, total = [np.zeros(0)], [np.zeros((0, num_sequences), dtype=bool)], 0
    # Grow all sets by one later sequence at a time, as far as time and memory allow.
    while len(last):
        after = time[:, None] + takes[None, :]
        filled = used[:, :, None] + need[None, :, :]
        allowed = (
            # Only sequences later in the order, so that each set is found once.
            (np.arange(len(among))[None, :] > last[:, None])
            & (after <= seconds)
            & (filled <= room[None, :, None]).all(axis=1)
        )
        parent, item = np.nonzero(allowed)
        total += len(parent)
        if total > most:
            return None
        time, used = after[parent, item], filled[parent, :, item]
        last, members = item, members[parent].copy()
        members[np.arange(len(item)), among[item]] = True
        times.append(time)
        sets.append(members)
    return np.concatenate(times), np.concatenate(sets)


class PatternProgramme:
    """The programme over the patterns that take no more than a first time."""

    def __init__(self, table: PriceTable, patterns: Patterns) -> None:
        self._table = table
        self._patterns = patterns
        self._is_whole = len(patterns.option) <= _MAX_WHOLE

    @property
    def times(self) -> Floats | None:
        """Return all seconds that the busiest group can take, ascending; None where they are not
        known."""
        patterns = self._patterns
        return None if patterns.loose.any() else np.asarray(np.unique(patterns.seconds))

    def solve(self, seconds: float) -> tuple[Answer, PackedGroups | None]:
        """Ask whether no group needs to take more than `seconds`; where the patterns are few, the
        answer comes with a deal, which is as fast where no sequence is loose."""
        table, patterns = self._table, self._patterns
        # Patterns, and single loose sequences, within the time.
        chosen = np.flatnonzero(patterns.seconds <= seconds * (1 + 1e-12))
        members, option = patterns.members[chosen], patterns.option[chosen]
        # Seconds that an option has beside its fixed ones.
        spare = seconds - table.fixed_s
        takes = patterns.loose & (table.seconds <= spare[:, None])
        taker, item = np.nonzero(takes)
        # A sequence that nothing takes makes the time impossible.
        if not (members.any(axis=0) | takes.any(axis=0)).all():
            return "impossible", None
        # Unknowns: patterns, parts of loose sequences, divided groups.
        num_kinds, count = len(table.tree.kinds), len(table.lengths)
        nest, limit = nest_rows(table.tree, table.kind_of_option[option])
        # Columns of `nest`: used groups, here one for each pattern, then divided groups.
        used, divided = nest[:, : len(option)], nest[:, len(option) :]
        dealt = csr_array((np.ones(len(item)), (item, np.arange(len(item)))), (count, len(item)))
        cover = [csr_array(members.T.astype(np.float64)), dealt, csr_array((count, num_kinds))]
        # [sequence, unknown]: each sequence is in patterns and parts once, together.
        rows = [
            LinearConstraint(hstack(cover, "csr"), 1.0, 1.0),
            LinearConstraint(
                hstack([used, csr_array((num_kinds, len(item))), divided], "csr"), -np.inf, limit
            ),
        ]
        if len(item):
            rows.append(self._room_of_loose(seconds, chosen, taker, item))
        others = np.zeros(len(item) + num_kinds)
        # A whole solution with few ranks at work leaves room for what is loose.
        cost = table.size_of_option[option].astype(np.float64) * self._is_whole
        found = milp(
            np.r_[cost, others],
            # Without whole patterns all unknowns are real: a linear programme, which bounds only.
            integrality=np.r_[np.full(len(option), int(self._is_whole)), others],
            bounds=Bounds(0.0, np.inf),
            constraints=rows,
            # Any solution will do: with a gap of 1 the solver stops at the first.
            options={"node_limit": _NODE_LIMIT, "mip_rel_gap": 1.0},
        )
        # The solver's answer; only whole patterns are a deal.
        if found.status == _INFEASIBLE:
            return "impossible", None
        if found.x is None:
            return "unknown", None
        if not self._is_whole:
            return "possible", None
        # The solver's whole numbers are whole up to its tolerance.
        times = np.rint(found.x[: len(option)]).astype(np.int64)
        return "possible", self._packed(option, members, times)

    def _packed(self, option: Ints, members: Bools, times: Ints) -> PackedGroups | None:
        """Pack a whole solution: each pattern in a group, and loose sequences where there is room,
        the longest first; None where there is none."""
        table = self._table
        uses = np.repeat(np.arange(len(option)), times)
        packing = PackedGroups(table, [int(option[p]) for p in uses])
        for group, pattern in enumerate(uses):
            for sequence in np.flatnonzero(members[pattern]):
                packing.put(int(sequence), group)
        everywhere = np.arange(len(uses))
        for sequence in np.argsort(-table.rank_seconds, kind="stable"):
            is_loose = packing.group_of[sequence] < 0
            if is_loose and not packing.place(int(sequence), everywhere):
                return None
        return packing

    def _room_of_loose(
        self, seconds: float, chosen: Ints, taker: Ints, item: Ints
    ) -> LinearConstraint:
        """Return the rows that hold loose sequences to the time and memory left by the patterns of
        an option.

        Args:
            seconds: of the slowest group.
            chosen: the patterns, which are the first unknowns.
            taker, item: option and sequence of each unknown that follows these.
        """
        table, patterns = self._table, self._patterns
        option, members = patterns.option[chosen], patterns.members[chosen]
        row: list[Ints] = []
        column: list[Ints] = []
        value: list[Floats] = []
        num_rows = 0
        # For each option: its loose sequences against what its patterns leave.
        for own in np.unique(taker):
            mine, groups = np.flatnonzero(taker == own), np.flatnonzero(option == own)
            # [row, sequence] and [row].
            memory, room = table.memory[table.rows[own]], table.room[table.rows[own]]
            # What does not fit is in no pattern.
            memory = np.where(np.isfinite(memory), memory, 0.0)
            left_s = seconds * (1 + 1e-9) - patterns.seconds[chosen[groups]]
            left = room[:, None] * (1 + 1e-9) - memory @ members[groups].T
            # One row for time and one for each member's memory, all relative to what there is.
            parts = [
                (table.seconds[own, item[mine]] / seconds, left_s / seconds),
                *zip(memory[:, item[mine]] / room[:, None], left / room[:, None], strict=True),
            ]
            for taken, there in parts:
                row.append(np.full(len(mine) + len(groups), num_rows))
                # Loose sequences take; each use of a pattern gives what the pattern leaves.
                column.append(np.r_[len(chosen) + mine, groups])
                value.append(np.r_[counted(taken), -np.maximum(there, 0.0)])
                num_rows += 1
        width = len(chosen) + len(item) + len(table.tree.kinds)
        matrix = coo_array(
            (np.concatenate(value), (np.concatenate(row), np.concatenate(column))),
            shape=(num_rows, width),
        )
        return LinearConstraint(matrix.tocsr(), -np.inf, 0.0)
