"""Moves inside one replica, by hand; and they keep its GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.planner.moves.neighbours import IN_ONE
from megatron_hetero.planner.moves.one_replica import cut, drop, join, shift, split
from megatron_hetero.planner.moves.places import ReplicaPlaces
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.units import Chain, Unit
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.strategies import cases

PROBLEM = make_problem(make_cluster(("a", FAST, 4), ("b", SLOW, 2)), make_workload(8, 8))
A, B, C = Unit("a", (0,)), Unit("a", (1, 2)), Unit("b", (0,))
"""One GPU, two, and one of the other node."""


def made(move: object, *chain: Unit) -> set[tuple[Chain, ...]]:
    """Return what a move makes of a replica."""
    assert callable(move)
    changes = move(ReplicaPlaces(PROBLEM, chain))
    return {chains for change in changes if (chains := change(chain)) is not None}


def test_each_move_by_hand() -> None:
    assert made(drop, A, B) == {((A,),), ((B,),)}
    assert made(shift, A, B, C) == {
        ((B, A, C),),
        ((B, C, A),),
        ((A, C, B),),
        ((C, A, B),),
    }
    assert made(cut, A, B) == {((A, Unit("a", (1,)), Unit("a", (2,))),)}
    assert made(join, A, C, Unit("a", (3,))) == {((Unit("a", (0, 3)), C),)}
    assert made(join, A, B, C) == set()  # three do not divide the model
    assert made(split, A, B, C) == {((A,), (B, C)), ((A, B), (C,)), ((A, C), (B,))}


def test_a_run_of_equal_stages_is_moved_at_its_ends() -> None:
    run = tuple(Unit("a", (i,)) for i in range(4))
    places = ReplicaPlaces(PROBLEM, (*run, C))
    assert places.gaps == [0, 4, 5]
    assert places.ends == [0, 3, 4]
    assert {chain for (chain,) in made(drop, *run, C)} == {
        (*run[1:], C),
        (*run[:3], C),
        run,
    }


@settings(max_examples=cases(30), deadline=None)
@given(st.permutations([A, B, C, Unit("a", (3,)), Unit("b", (1,))]), st.integers(1, 5))
@pytest.mark.parametrize("move", IN_ONE, ids=lambda move: move.__name__)
def test_no_gpu_is_gained_or_doubled(move: object, order: list[Unit], depth: int) -> None:
    chain = tuple(order[:depth])
    before = sorted(device for unit in chain for device in unit.devices)
    for chains in made(move, *chain):
        after = sorted(device for own in chains for unit in own for device in unit.devices)
        assert set(after) < set(before) if move is drop else after == before
