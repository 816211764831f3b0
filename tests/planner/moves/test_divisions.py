"""Moves of divided sequences lead to structures that job and nodes allow."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.divided import divided_structures
from megatron_hetero.planner.units import Unit, joined_units
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.strategies import cases

CLUSTER = make_cluster(("a", FAST, 4), ("b", FAST, 2), ("c", SLOW, 2), limits=FREE)
PROBLEM = make_problem(CLUSTER, make_workload(8, seq_length=4096, sequence_parallel=True))


@settings(max_examples=cases(20), deadline=None)
@given(st.data())
def test_all_units_are_allowed_and_have_gpus_of_their_own(data: st.DataObject) -> None:
    structure = data.draw(st.sampled_from(divided_structures(PROBLEM, float("inf"), 1000)))
    shape = Completer(PROBLEM).shape
    for _ in range(3):
        units = [unit for chain in structure for unit in chain]
        devices = [device for unit in units for device in unit.devices]
        assert len(set(devices)) == len(devices)
        assert set(devices) <= set(CLUSTER.devices)
        for unit in units:
            assert PROBLEM.may_be_a_unit(unit)
            nodes = [node for node, _ in unit.parts]
            assert nodes == sorted(set(nodes))
            assert len(unit.devices) == unit.width * unit.context_parallel
        structure = data.draw(st.sampled_from(list(neighbours(PROBLEM, structure, shape))))


def test_groups_become_wider_narrower_or_one_stage() -> None:
    shape = Completer(PROBLEM).shape
    one, other = Unit("a", (0, 1)), Unit("a", (2, 3))
    both = Unit("a", (0, 1, 2, 3), 2)
    over = Unit("b", (0, 1), 2, (("c", (0, 1)),))
    narrow = Unit("b", (0, 1), 4, (("c", (0, 1)),))
    assert joined_units((Unit("c", (0, 1)), Unit("b", (0, 1)))) == over
    assert ((both, over),) in set(neighbours(PROBLEM, ((one, other, over),), shape))
    assert ((both, over),) in set(neighbours(PROBLEM, ((both, narrow),), shape))
    assert ((both, narrow),) in set(neighbours(PROBLEM, ((both, over),), shape))


def test_groups_that_the_length_of_sequences_does_not_take_are_left_out() -> None:
    shape = Completer(PROBLEM).shape
    chain = Unit("a", (0, 1), 2), Unit("a", (2,))
    assert ((Unit("a", (0, 1, 2), 3),),) not in set(neighbours(PROBLEM, (chain,), shape))  # 4096/6
    longer = replace(PROBLEM.workload.model, seq_length=4608, max_position_embeddings=4608)
    problem = make_problem(CLUSTER, replace(PROBLEM.workload, model=longer))
    moved = set(neighbours(problem, (chain,), Completer(problem).shape))
    assert ((Unit("a", (0, 1, 2), 3),),) in moved


def test_without_a_divided_stage_there_is_no_such_move() -> None:
    shape = Completer(PROBLEM).shape
    chain = (Unit("a", (0, 1)), Unit("a", (2, 3)), Unit("b", (0, 1)))
    for moved in neighbours(PROBLEM, (chain,), shape):
        assert all(unit.context_parallel == 1 for c in moved for unit in c)
