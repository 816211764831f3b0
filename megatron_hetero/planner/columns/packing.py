"""Packing in fractions: the linear programme ``max w x, A x <= b, x >= 0`` with few rows.

The search solves thousands of these small programmes, and a general solver spends most of its time
on checking its input.  So here is a simplex of its own.  It can start from ``x = 0``, because ``A``
and ``b`` are not negative, and its tableau has one row for each class of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hetero.rounding import ROUNDING

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Packing:
    """The best worth, the amount taken of each column, and the worth of one more of each row."""

    worth: float
    taken: Floats
    row_values: Floats


def pack(worths: Floats, rows: Floats, capacity: Floats) -> Packing:
    """Solve the programme by the primal simplex method.

    Args:
        worths: w, shape [column].
        rows: A, shape [row, column]; not negative, and no worthy column is empty.
        capacity: b, shape [row]; not negative.
    Raises:
        ValueError: a worthy column takes nothing of any row.
    """
    num_rows, num_columns = rows.shape
    scale = float(np.max(worths, initial=0.0))
    # Nothing is worth taking.
    if scale <= 0.0:
        return Packing(0.0, np.zeros(num_columns), np.zeros(num_rows))
    # Columns, slacks, and the right-hand side; the last row is worth gained so far, negated.
    tableau = np.zeros((num_rows + 1, num_columns + num_rows + 1))
    tableau[:-1, :num_columns] = rows
    tableau[:-1, num_columns:-1] = np.eye(num_rows)
    tableau[:-1, -1] = capacity
    # Scaled to one, so that `ROUNDING` means the same in every programme.
    tableau[-1, :num_columns] = worths / scale
    basis = np.arange(num_columns, num_columns + num_rows)
    num_stalled = 0
    while True:
        gains = tableau[-1, :-1]
        # After steps without gain the lowest index: Bland's rule, which never cycles.
        if num_stalled > num_rows:
            entering = int(np.argmax(gains > ROUNDING))
        else:
            entering = int(np.argmax(gains))
        # No column gains any more: the basis is optimal.
        if gains[entering] <= ROUNDING:
            break
        # The row that runs out first leaves the basis.
        column = tableau[:-1, entering]
        # Rows that the column takes nothing of do not limit it.
        usable = np.flatnonzero(column > ROUNDING)
        if not len(usable):
            raise ValueError(f"column {entering} takes nothing of any row")
        ratios = tableau[usable, -1] / column[usable]
        least = ratios.min()
        tied = usable[ratios <= least]
        # Of tied rows the one with the lowest index in the basis, as Bland's rule asks.
        leaving = int(tied[np.argmin(basis[tied])])
        num_stalled = num_stalled + 1 if least <= 0.0 else 0
        # Pivot on (leaving, entering).
        tableau[leaving] /= tableau[leaving, entering]
        factors = tableau[:, entering].copy()
        factors[leaving] = 0.0
        tableau -= factors[:, None] * tableau[leaving]
        # What a step leaves exactly: the tie is broken, and rounding does not go below zero.
        tableau[:, entering] = 0.0
        tableau[leaving, entering] = 1.0
        np.maximum(tableau[:-1, -1], 0.0, out=tableau[:-1, -1])
        basis[leaving] = entering
    # Columns in the basis, and what one more of each row would be worth.
    taken = np.zeros(num_columns + num_rows)
    taken[basis] = tableau[:-1, -1]
    # The reduced cost of a row's slack is what one more of the row is worth.
    row_values = np.maximum(-tableau[-1, num_columns:-1], 0.0) * scale
    return Packing(-float(tableau[-1, -1]) * scale, taken[:num_columns], row_values)
