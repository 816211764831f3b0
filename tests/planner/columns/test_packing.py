"""Packing in fractions: as HiGHS solves it, and by duality."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from megatron_hetero.planner.columns.packing import pack


@st.composite
def programmes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bundles that take whole nodes of a few kinds; some kinds have none left, some worths are
    equal, some nothing."""
    num_rows, num_columns = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    column = st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows).filter(any)
    rows = np.array([draw(column) for _ in range(num_columns)], float).T
    worth = st.sampled_from([0.0, 0.1, 1.0, 1.0, 3.7, 1e4])
    worths = np.array([draw(worth) for _ in range(num_columns)])
    capacity = np.array([draw(st.integers(0, 20)) for _ in range(num_rows)], float)
    return worths, rows, capacity


@given(programmes())
def test_it_is_the_optimum(programme: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    worths, rows, capacity = programme
    found = pack(worths, rows, capacity)
    scale = max(worths.max(), 1.0) * max(capacity.max(), 1.0)
    assert (found.taken >= 0).all()
    assert (rows @ found.taken <= capacity + 1e-9 * (1 + capacity)).all()
    assert found.worth == pytest.approx(worths @ found.taken, abs=1e-9 * scale)
    # Prices under which no column gains, and that add up to the same: a proof of the optimum.
    assert (found.row_values >= 0).all()
    assert (found.row_values @ rows >= worths - 1e-9 * scale).all()
    assert found.row_values @ capacity == pytest.approx(found.worth, abs=1e-8 * scale)
    reference = linprog(-worths, A_ub=rows, b_ub=capacity, method="highs")
    assert found.worth == pytest.approx(-reference.fun, abs=1e-7 * scale)


def test_a_classic_cycle_ends() -> None:
    """Beale's example, on which the largest gain alone goes round for ever."""
    worths = np.array([0.75, 0.0, 0.02, 0.0])
    rows = np.array([[0.25, 0.0, 0.0, 9.0], [0.5, 0.0, 0.0, 3.0], [0.0, 0.0, 1.0, 0.0]])
    found = pack(worths, rows + np.array([[0.0, 1.0, 0.0, 0.0]] * 3), np.array([0.0, 0.0, 1.0]))
    assert found.worth == pytest.approx(0.02)


def test_a_worthy_column_that_takes_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="takes nothing"):
        pack(np.array([1.0]), np.array([[0.0]]), np.array([1.0]))
