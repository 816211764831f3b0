"""Offers that others make needless."""

from __future__ import annotations

import pytest

from megatron_hetero.serving.compose.milp import _MilpProblem
from megatron_hetero.serving.compose.problem import Composing, Offer, Rentable, Resource
from tests.serving.compose.cases import drawn


def test_dominated_offers_leave_and_equal_ones_stay_once() -> None:
    offers = (
        Offer("best", "both", "-", (2.0,), {"x": 1}),
        Offer("twin", "both", "-", (2.0,), {"x": 1}),
        Offer("slow", "both", "-", (1.0,), {"x": 1}),
        Offer("pair", "both", "-", (3.9,), {"x": 2}),
        Offer("good pair", "both", "-", (4.1,), {"x": 2}),
        Offer("nothing", "both", "-", (0.0,), {"x": 1}),
    )
    problem = Composing(offers, (Rentable("x", 4),), (Resource("x", "x", 1),), (1.0,), ("w",))
    assert [o.name for o in problem.without_dominated().offers] == ["best", "good pair"]


@pytest.mark.parametrize("has_roles", [False, True])
def test_the_best_answer_needs_no_dominated_offer(has_roles: bool) -> None:
    for seed in range(300, 330):
        problem = drawn(seed, has_roles)
        whole = _MilpProblem(problem, is_cost=False).solve(1e-9, 60.0)
        small = _MilpProblem(problem.without_dominated(), is_cost=False).solve(1e-9, 60.0)
        values = [0.0 if found is None else found.scale for found in (whole, small)]
        assert values[0] == pytest.approx(values[1], rel=1e-6, abs=1e-9), seed
