"""The programme of few sequences: every set of them that one group could take is an unknown.

Where a micro-batch holds few, long sequences, the aggregated programme cannot see that they do not
divide evenly.  Here its unknowns are the sets ("patterns") themselves, as in cutting stock
(Gilmore and Gomory 1961), so that the bound is almost always exact, and a whole solution is a deal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, hstack

from megatron_hetero.sequences.deal.packing import PackedGroups
from megatron_hetero.sequences.deal.price_table import PriceTable
from megatron_hetero.sequences.deal.programme import Answer, nest_rows
from megatron_hetero.sequences.price.group_price import Floats

MAX_SEQUENCES = 80
_MAX_OF_OPTION = 3_000
_MAX_PATTERNS = 9_000
_MAX_WHOLE = 1_500
"""With more patterns they are used in parts: the bound is weaker, and there is no deal."""
_NODE_LIMIT = 200
_INFEASIBLE = 2

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Patterns:
    """Sets that some group takes within a time: the option of each, shape [pattern]; its seconds;
    and which sequences are in it, shape [pattern, sequence].  Options with too many sets are
    `open`: what they take is only counted."""

    option: Ints
    seconds: Floats
    members: npt.NDArray[np.bool_]
    open: tuple[int, ...]


def patterns_within(table: PriceTable, seconds: float) -> Patterns | None:
    """Find the sets of sequences that a group of each option does in `seconds`; None where there
    are too many sequences."""
    num_sequences = len(table.lengths)
    if num_sequences > MAX_SEQUENCES:
        return None
    found = [(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, num_sequences), dtype=bool))]
    left, unlisted = _MAX_PATTERNS, []
    # Small groups take few sequences each.
    for option in np.argsort(table.size_of_option, kind="stable"):
        sets = _sets(table, int(option), seconds, min(left, _MAX_OF_OPTION))
        if sets is None:
            unlisted.append(int(option))
            continue
        left -= len(sets[0])
        found.append((np.full(len(sets[0]), option), *sets))
    options, times, members = (np.concatenate(part) for part in zip(*found, strict=True))
    return Patterns(options, times, members, tuple(sorted(unlisted)))


def _sets(
    table: PriceTable, option: int, seconds: float, most: int
) -> tuple[Floats, npt.NDArray[np.bool_]] | None:
    """Find seconds and members of all sets of one option; None where they are more than `most`."""
    num_sequences = len(table.lengths)
    rows = table.rows[option]
    need, room = table.memory[rows], table.room[rows] * (1 + 1e-9)
    time, used = np.array([table.fixed_s[option]]), np.zeros((1, len(room)))
    last, members = np.array([-1]), np.zeros((1, num_sequences), dtype=bool)
    times, sets, total = [np.zeros(0)], [np.zeros((0, num_sequences), dtype=bool)], 0
    while len(last):
        after = time[:, None] + table.seconds[option][None, :]
        filled = used[:, :, None] + need[None, :, :]
        allowed = (
            (np.arange(num_sequences)[None, :] > last[:, None])
            & (after <= seconds)
            & (filled <= room[None, :, None]).all(axis=1)
        )
        parent, item = np.nonzero(allowed)
        total += len(parent)
        if total > most:
            return None
        time, used = after[parent, item], filled[parent, :, item]
        last, members = item, members[parent].copy()
        members[np.arange(len(item)), item] = True
        times.append(time)
        sets.append(members)
    return np.concatenate(times), np.concatenate(sets)


class PatternProgramme:
    """The programme over the patterns that take no more than a first time."""

    def __init__(self, table: PriceTable, patterns: Patterns) -> None:
        self._table = table
        self._patterns = patterns
        self._is_whole = len(patterns.option) <= _MAX_WHOLE and not patterns.open

    @property
    def times(self) -> Floats | None:
        """Return all seconds that the busiest group can take, ascending; None where they are not
        known."""
        return None if self._patterns.open else np.asarray(np.unique(self._patterns.seconds))

    def solve(self, seconds: float) -> tuple[Answer, PackedGroups | None]:
        """Ask whether no group needs to take more than `seconds`; where the patterns are few, the
        answer comes with a deal."""
        table, patterns = self._table, self._patterns
        chosen = np.flatnonzero(patterns.seconds <= seconds * (1 + 1e-12))
        members, option = patterns.members[chosen], patterns.option[chosen]
        opened = np.array(patterns.open, dtype=np.int64)
        spare = seconds - table.fixed_s
        takes = np.zeros((len(table.fixed_s), len(table.lengths)), dtype=bool)
        takes[opened] = table.seconds[opened] <= spare[opened, None]
        taker, item = np.nonzero(takes)
        if not (members.any(axis=0) | takes.any(axis=0)).all():
            return "impossible", None
        # Unknowns: patterns, sequences of open options, groups of open options, divided groups.
        num_kinds, num_open = len(table.tree.kinds), len(opened)
        kinds = np.r_[table.kind_of_option[option], table.kind_of_option[opened]]
        nest, limit = nest_rows(table.tree, kinds)
        used, divided = nest[:, : len(option)], nest[:, len(option) :]
        count = len(table.lengths)
        dealt = csr_array((np.ones(len(item)), (item, np.arange(len(item)))), (count, len(item)))
        cover = hstack([csr_array(members.T.astype(np.float64)), dealt])
        wide = num_open + num_kinds
        rows = [
            LinearConstraint(hstack([cover, csr_array((count, wide))], "csr"), 1.0, 1.0),
            LinearConstraint(
                hstack([used, csr_array((num_kinds, len(item))), divided], "csr"), -np.inf, limit
            ),
        ]
        if num_open:
            rows.append(_room_of_open(table, opened, taker, item, spare, len(option), num_kinds))
        found = milp(
            np.r_[
                table.size_of_option[option].astype(np.float64),
                np.zeros(len(item)),
                table.size_of_option[opened],
                np.zeros(num_kinds),
            ],
            integrality=np.r_[
                np.full(len(option), int(self._is_whole)),
                np.zeros(len(item)),
                np.ones(num_open),
                np.zeros(num_kinds),
            ],
            bounds=Bounds(0.0, np.inf),
            constraints=rows,
            options={"node_limit": _NODE_LIMIT, "mip_rel_gap": 1.0},
        )
        if found.status == _INFEASIBLE:
            return "impossible", None
        if found.x is None:
            return "unknown", None
        if not self._is_whole:
            return "possible", None
        packing = PackedGroups(
            table, [int(option[p]) for p in np.flatnonzero(found.x[: len(option)] > 0.5)]
        )
        for group, pattern in enumerate(np.flatnonzero(found.x[: len(option)] > 0.5)):
            for sequence in np.flatnonzero(members[pattern]):
                packing.put(int(sequence), group)
        return "possible", packing


def _room_of_open(
    table: PriceTable,
    opened: Ints,
    taker: Ints,
    item: Ints,
    spare: Floats,
    first: int,
    num_kinds: int,
) -> LinearConstraint:
    """Return the rows that hold open options to the time and the memory of their groups.

    Args:
        table: prices of the sequences.
        opened: the open options.
        taker, item: option and sequence of each unknown that follows the first ones.
        spare: seconds of each option for its sequences.
        first: number of unknowns before these.
        num_kinds: number of unknowns after the groups of open options.
    """
    row: list[Ints] = []
    column: list[Ints] = []
    value: list[Floats] = []
    num_rows = 0
    for place, option in enumerate(opened):
        mine = np.flatnonzero(taker == option)
        group = first + len(item) + place
        parts = [table.seconds[option, item[mine]] / max(float(spare[option]), 1e-300)]
        parts += list(
            table.memory[table.rows[option]][:, item[mine]] / table.room[table.rows[option], None]
        )
        for part in parts:
            row.append(np.full(len(mine) + 1, num_rows))
            column.append(np.r_[first + mine, group])
            value.append(np.r_[part, -(1 + 1e-9)])
            num_rows += 1
    matrix = coo_array(
        (np.concatenate(value), (np.concatenate(row), np.concatenate(column))),
        shape=(num_rows, first + len(item) + len(opened) + num_kinds),
    )
    return LinearConstraint(matrix.tocsr(), -np.inf, 0.0)
