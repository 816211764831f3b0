"""The aggregated programme: can the sequences of a micro-batch be done within a time?

Unknown are the number of groups of each kind and option, and how many sequences of each bucket
each option takes; which group takes which sequence is left open.  For a given time that is a small
linear programme with few integers.  Where it has no solution no deal is so fast: the time is a
certified lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from megatron_hetero.sequences.deal.buckets import Buckets
from megatron_hetero.sequences.price.group_price import Floats
from megatron_hetero.sequences.tree import GroupTree

Ints = npt.NDArray[np.int64]
Answer = Literal["possible", "impossible", "unknown"]
Whole = Literal["nothing", "groups", "all"]
"""The parts of a solution that are whole numbers: nothing (the relaxation), numbers of groups, or
numbers of sequences too, unless too many; each is slower than the last, and sharper."""
_NODE_LIMIT = 100
_OPTIMAL, _INFEASIBLE = 0, 2
_WHOLE_SEQUENCES = 40
"""With no more sequences than this their numbers can be asked to be whole; more take too long."""
_SLACK = 1e-9
_LEAST_PART = 1e-5
_ONLY_SO_MANY = (1, 2, 3)
"""Values of m: a group takes at most m sequences longer than its (m + 1)th part."""


@dataclass(frozen=True)
class Solution:
    """`answer` for one time; where it is possible, numbers of groups, shape [option], and of
    sequences, shape [option, bucket] (whole numbers or not)."""

    answer: Answer
    num_groups: npt.NDArray[np.int64] | None = None
    dealt: Floats | None = None


class Programme:
    """The programme of a micro-batch, solved for varying times."""

    def __init__(self, buckets: Buckets) -> None:
        self._table = table = buckets.table
        self._counts = buckets.counts
        self._num_options, self._num_buckets = table.seconds.shape
        self._num_kinds = len(table.tree.kinds)
        # Pairs (option, bucket) of a bucket that fits on the option at all, [pair].
        pairs = np.nonzero(np.isfinite(table.seconds))
        self._option, self._bucket = (np.asarray(index) for index in pairs)
        self._taken = table.seconds[self._option, self._bucket]
        self._filled = table.fullest[self._option, self._bucket]
        self._is_countable = self._counts.sum() <= _WHOLE_SEQUENCES

    def solve(self, seconds: float, room: float = 1.0, whole: Whole = "groups") -> Solution:
        """Ask whether all can be done in `seconds`.

        Args:
            seconds: of the slowest group, its fixed seconds included.
            room: part of every member's memory that may be filled; below 1 "impossible" is no
                bound.
            whole: what has to be whole.
        """
        # Pairs of option and bucket that are possible within the time and the memory.
        table = self._table
        spare = np.maximum(seconds - table.fixed_s, 0.0) * (1 + _SLACK)
        allowed = (self._taken <= spare[self._option]) & (self._filled <= room * (1 + _SLACK))
        option, bucket = self._option[allowed], self._bucket[allowed]
        # A bucket that no option takes makes the time impossible.
        if len(np.unique(bucket)) < self._num_buckets:
            return Solution("impossible")
        # Unknowns: sequences of each pair, groups of each option, divided groups of each kind.
        num_pairs = len(option)
        first_group = num_pairs
        num_unknowns = first_group + self._num_options + self._num_kinds
        pair = np.arange(num_pairs)
        groups = first_group + np.arange(self._num_options)
        rows = _MatrixRows(num_unknowns)
        # Every sequence goes somewhere.
        rows.add(bucket, pair, np.ones(num_pairs), self._counts, self._counts)
        # What an option takes is not more than the time, and the memory, of its groups.
        none, options = np.full(self._num_options, -np.inf), np.arange(self._num_options)
        taken = self._taken[allowed]
        # Rows relative to the time, because the solver's tolerance is absolute.
        scale = 1.0 / max(seconds, 1e-300)
        rows.add(
            np.r_[option, options],
            np.r_[pair, groups],
            np.r_[counted(taken * scale), -spare * scale],
            none,
            np.zeros(self._num_options),
        )
        # Memory of each member of an option's groups.
        for w, own in enumerate(table.rows):
            mine = option == w
            if not mine.any():
                continue
            parts = counted(table.memory[own][:, bucket[mine]] / table.room[own][:, None])
            for row in parts:
                rows.add_one(
                    np.r_[pair[mine], groups[w]], np.r_[row, -room * (1 + _SLACK)], -np.inf, 0.0
                )
        # Large sequences: only so many fit in one group, which fractions would not see.
        with np.errstate(divide="ignore", invalid="ignore"):
            # The part of a group's time or memory that one sequence takes, whichever is larger.
            part = np.maximum(taken / spare[option], self._filled[allowed])
        for most in _ONLY_SO_MANY:
            # More than 1 / (m + 1) each: m + 1 of them are too much for one group.
            large = part > (1 + 1e-6) / (most + 1)
            if large.any():
                rows.add(
                    np.r_[option[large], options],
                    np.r_[pair[large], groups],
                    np.r_[np.ones(int(large.sum())), np.full(self._num_options, -float(most))],
                    none,
                    np.zeros(self._num_options),
                )
        # Groups are in each other: their numbers must be possible in the nest.
        nest, limit = nest_rows(table.tree, table.kind_of_option)
        inner = nest.tocoo()
        rows.add(
            inner.row,
            first_group + inner.col,
            inner.data,
            np.full(self._num_kinds, -np.inf),
            limit,
        )
        # [unknown]; numbers of groups are limited by the nest.
        upper = np.r_[self._counts[bucket], np.full(num_unknowns - num_pairs, np.inf)]
        integer = np.r_[
            np.full(num_pairs, int(whole == "all" and self._is_countable)),
            np.full(self._num_options, int(whole != "nothing")),
            np.zeros(self._num_kinds),
        ]
        # Of all solutions one with few ranks at work: what is left over helps to divide evenly.
        cost = np.zeros(num_unknowns)
        cost[groups] = table.size_of_option
        return self._answer(
            milp(
                cost,
                integrality=integer,
                bounds=Bounds(0.0, upper),
                constraints=rows.constraint(),
                options={"node_limit": _NODE_LIMIT, "mip_rel_gap": 1.0},
            ),
            option,
            bucket,
        )

    def _answer(
        self, found: object, option: npt.NDArray[np.int64], bucket: npt.NDArray[np.int64]
    ) -> Solution:
        status, solution = getattr(found, "status", None), getattr(found, "x", None)
        if status == _INFEASIBLE:
            return Solution("impossible")
        if solution is None:
            return Solution("unknown")
        dealt = np.zeros((self._num_options, self._num_buckets))
        dealt[option, bucket] = solution[: len(option)]
        groups = solution[len(option) : len(option) + self._num_options]
        return Solution("possible", np.rint(groups).astype(np.int64), dealt)


def counted(parts: Floats) -> Floats:
    """Leave out parts of a group's time or memory near the tolerance of the solver, 1e-6: with such
    parts HiGHS has called possible programmes infeasible. Without small parts a programme only
    refuses less, so that a bound stays valid."""
    return np.where(parts < _LEAST_PART, 0.0, parts)


def nest_rows(tree: GroupTree, kind_of: npt.NDArray[np.int64]) -> tuple[csr_array, Floats]:
    """Return rows, with upper limits, that state the numbers of groups possible for the ranks.

    A group of the tree is used whole or divided, and of each kind there are as many as the divided
    ones of larger kinds have.  Columns are numbers of used groups, then of divided groups.

    Args:
        tree: the groups of the job.
        kind_of: the kind of the groups that each of the first columns counts.
    Returns:
        Shapes [kind, column] and [kind].
    """
    num_used, num_kinds = len(kind_of), len(tree.kinds)
    divided = num_used + np.arange(num_kinds)
    # A used or a divided group is one of its kind.
    row, column = [*kind_of, *range(num_kinds)], [*range(num_used), *divided]
    value = [1.0] * len(row)
    # Each divided group brings the parts of its kind.
    for larger, kind in enumerate(tree.kinds):
        for part, count in kind.parts.items():
            row.append(part)
            column.append(divided[larger])
            value.append(-float(count))
    matrix = csr_array(coo_array((value, (row, column)), shape=(num_kinds, num_used + num_kinds)))
    # There is one group of all ranks, kind 0; others are parts of larger ones.
    return matrix, np.array([1.0] + [0.0] * (num_kinds - 1))


class _MatrixRows:
    """Rows of a sparse matrix, with their limits."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_rows = 0
        self._parts: list[tuple[Ints, Ints, Floats]] = []
        self._limits: list[tuple[Floats, Floats]] = []

    def add(self, row: Ints, column: Ints, value: Floats, low: Floats, high: Floats) -> None:
        """Add as many rows as `low` has entries; `row` counts from 0."""
        self._parts.append((row + self._num_rows, column, value))
        self._limits.append((low, high))
        self._num_rows += len(low)

    def add_one(self, column: Ints, value: Floats, low: float, high: float) -> None:
        """Add one row."""
        zeros = np.zeros(len(column), dtype=np.int64)
        self.add(zeros, column, value, np.array([low]), np.array([high]))

    def constraint(self) -> LinearConstraint:
        """Return all rows as scipy takes them."""
        row, column, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        low, high = (np.concatenate(limit) for limit in zip(*self._limits, strict=True))
        matrix = coo_array((value, (row, column)), shape=(self._num_rows, self._num_columns))
        return LinearConstraint(matrix.tocsr(), low, high)
