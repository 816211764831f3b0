"""Divisions of layers over stages: all of them, or the first of too many."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.planner.stock.divisions import num_stage_divisions, stage_divisions

ALLOWED = st.lists(st.sets(st.integers(1, 5), max_size=4).map(sorted), min_size=1, max_size=4)


@given(num_layers=st.integers(1, 9), allowed=ALLOWED, most=st.integers(1, 4))
def test_the_first_divisions_are_those_of_all(
    num_layers: int, allowed: list[list[int]], most: int
) -> None:
    wanted = sorted(row for row in product(*allowed) if sum(row) == num_layers)
    rows = stage_divisions(num_layers, allowed)
    assert [tuple(row) for row in rows.tolist()] == wanted
    assert num_stage_divisions(num_layers, allowed) == len(wanted)
    assert stage_divisions(num_layers, allowed, most).tolist() == rows[:most].tolist()


def test_of_millions_the_first_are_made_alone() -> None:
    """16 equal stages of up to 3 layers: all divisions of 32 layers take half a minute and 1 GB."""
    allowed = [[1, 2, 3]] * 16
    assert num_stage_divisions(32, allowed) > 5_000_000
    assert stage_divisions(32, allowed, 1200).shape == (1200, 16)
