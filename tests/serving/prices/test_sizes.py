"""Ratios on a grid over sizes: exact at nodes, between them on straight lines of logarithms."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.serving.prices.sizes import SizeGrid, SizeRatios

GRID = SizeGrid((0, 2), (3, 2))
SIZES = st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6))


def test_nodes_have_their_own_ratio_and_points_between_the_mean_of_logarithms() -> None:
    ratios = SizeRatios(GRID, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert ratios.at((4.0, 16.0)) == pytest.approx(exp(0.2))
    assert ratios.at((4.0, 64.0)) == pytest.approx(exp(0.3))
    assert ratios.at((2.0, 32.0)) == pytest.approx(exp((0.0 + 0.1 + 0.2 + 0.3) / 4))


def test_calls_beyond_the_grid_have_the_ratio_of_the_nearest_edge() -> None:
    ratios = SizeRatios(GRID, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert ratios.at((0.0, 1.0)) == 1.0
    assert ratios.at((1e9, 1e9)) == pytest.approx(exp(0.5))


@given(SIZES)
def test_weights_of_the_nodes_around_a_call_add_up_to_one(sizes: tuple[float, float]) -> None:
    around = GRID.around(sizes)
    assert len({node for node, _ in around}) == len(around) == 4
    assert all(0 <= node < GRID.num_nodes and 0.0 <= weight <= 1.0 for node, weight in around)
    assert sum(weight for _, weight in around) == pytest.approx(1.0)
