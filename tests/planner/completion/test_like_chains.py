"""Chains of equal groups over equal hops are alike."""

from __future__ import annotations

from megatron_hetero.planner.completion.like_chains import LikeChains
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.units import Unit
from tests.planner.completion.boxes import WORKLOAD, boxes, chain


def test_like_groups_have_one_number_and_unlike_ones_do_not() -> None:
    like = LikeChains(make_problem(boxes(), WORKLOAD))
    assert like.group(Unit("b", (0,))) == like.group(Unit("c", (1,)))
    assert like.group(Unit("b", (0,))) != like.group(Unit("b", (0, 1)))
    assert like.group(Unit("a", (0,))) != like.group(Unit("b", (0,)))
    assert like.of(chain("a0", "b0")).shape == like.of(chain("a1", "c1")).shape
    assert like.of(chain("a0", "b0")).shape != like.of(chain("b0", "a0")).shape
    assert like.of(chain("b0", "b1")).shape != like.of(chain("b0", "c1")).shape
