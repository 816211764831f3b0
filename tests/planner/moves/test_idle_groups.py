"""Moves that take idle GPUs, by hand."""

from __future__ import annotations

from megatron_hetero.planner.moves.idle_groups import begin, idle_of, insert, widen
from megatron_hetero.planner.moves.places import ReplicaPlaces
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.units import Structure, Unit
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

PROBLEM = make_problem(make_cluster(("a", FAST, 4), ("b", SLOW, 2)), make_workload(8, 8))
A, C = Unit("a", (0,)), Unit("b", (0,))
STRUCTURE: Structure = ((A,), (C,))


def test_idle_gpus_are_those_that_no_stage_has() -> None:
    assert idle_of(PROBLEM, STRUCTURE) == {"a": (1, 2, 3), "b": (1,)}
    assert idle_of(PROBLEM, ()) == {"a": (0, 1, 2, 3), "b": (0, 1)}


def test_an_idle_group_becomes_a_stage_before_or_behind() -> None:
    idle = idle_of(PROBLEM, STRUCTURE)
    found = set(insert(ReplicaPlaces(PROBLEM, (A,)), STRUCTURE, [(0,)], idle))
    more = Unit("a", (1,)), Unit("a", (1, 2)), Unit("b", (1,))
    assert found == {((unit, A), (C,)) for unit in more} | {((A, unit), (C,)) for unit in more}


def test_all_replicas_of_a_scope_get_one_or_none_does() -> None:
    structure: Structure = ((A,), (Unit("a", (1,)),))
    idle = idle_of(PROBLEM, structure)
    found = set(insert(ReplicaPlaces(PROBLEM, (A,)), structure, [(0, 1)], idle))
    ends = Unit("a", (2,)), Unit("a", (3,))
    assert ((A, ends[0]), (Unit("a", (1,)), ends[1])) in found
    assert all(len(chain) == 2 for made in found for chain in made)
    assert not any(unit.width == 2 for made in found for chain in made for unit in chain)


def test_a_stage_gets_wider_on_its_own_node() -> None:
    idle = idle_of(PROBLEM, STRUCTURE)
    found = set(widen(ReplicaPlaces(PROBLEM, (A,)), STRUCTURE, [(0,)], idle))
    assert found == {
        ((Unit("a", (0, 1)),), (C,)),
        ((Unit("a", (0, 1, 2, 3)),), (C,)),
    }


def test_a_replica_begins_on_idle_gpus() -> None:
    found = set(begin(PROBLEM, STRUCTURE, idle_of(PROBLEM, STRUCTURE)))
    more = Unit("a", (1,)), Unit("a", (1, 2)), Unit("b", (1,))
    assert found == {(*STRUCTURE, (unit,)) for unit in more}
