"""Moves between two replicas, by hand; and they keep the GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.planner.moves.neighbours import IN_TWO
from megatron_hetero.planner.moves.places import ReplicaPlaces
from megatron_hetero.planner.moves.two_replicas import exchange, give
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.units import Chain, Unit
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.strategies import cases

PROBLEM = make_problem(make_cluster(("a", FAST, 4), ("b", SLOW, 2)), make_workload(8, 8))
A, B, C = Unit("a", (0,)), Unit("a", (1, 2)), Unit("b", (0,))


def made(move: object, one: Chain, other: Chain) -> set[tuple[Chain, ...]]:
    """Return what a move makes of two replicas."""
    assert callable(move)
    changes = move(ReplicaPlaces(PROBLEM, one), ReplicaPlaces(PROBLEM, other))
    return {chains for change in changes if (chains := change(one, other)) is not None}


def test_each_move_by_hand() -> None:
    assert made(exchange, (A,), (B, C)) == {((B,), (A, C)), ((C,), (B, A))}
    assert made(exchange, (A,), (Unit("a", (3,)),)) == set()  # nothing would change
    assert made(give, (A, B), (C,)) == {
        ((B,), (A, C)),
        ((B,), (C, A)),
        ((A,), (B, C)),
        ((A,), (C, B)),
        ((), (C, A, B)),
        ((), (A, C, B)),
        ((), (A, B, C)),
    }


@settings(max_examples=cases(30), deadline=None)
@given(st.permutations([A, B, C, Unit("a", (3,)), Unit("b", (1,))]), st.integers(1, 4))
@pytest.mark.parametrize("move", IN_TWO, ids=lambda move: move.__name__)
def test_no_gpu_is_gained_or_lost(move: object, order: list[Unit], depth: int) -> None:
    one, other = tuple(order[:depth]), tuple(order[depth:])
    before = sorted(device for unit in order for device in unit.devices)
    for chains in made(move, one, other):
        assert len(chains) <= 2
        after = sorted(device for own in chains for unit in own for device in unit.devices)
        assert after == before
