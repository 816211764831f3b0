"""Starts whose stages divide sequences: grids on the nodes' GPUs, none that promises too little."""

from __future__ import annotations

from math import inf

from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.divided import (
    _layer_at_least_s,
    _layer_s,
    divided_structures,
)
from megatron_hetero.planner.units import Unit
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload

NODES = ("a", FAST, 2), ("b", SLOW, 1), ("c", SLOW, 1)
WORKLOAD = make_workload(seq_length=4096, sequence_parallel=True)


def test_grids_of_stages_on_one_node_on_like_nodes_and_on_all() -> None:
    found = divided_structures(make_problem(make_cluster(*NODES, limits=FREE), WORKLOAD), inf, 99)
    fast, slow = Unit("a", (0, 1), 2), Unit("b", (0,), 2, (("c", (0,)),))
    every = Unit("a", (0, 1), 4, (("b", (0,)), ("c", (0,))))
    for structure in ((fast,),), ((slow,),), ((every,),), ((fast, slow),), ((fast,), (slow,)):
        assert structure in found
    assert len(set(found)) == len(found)


def test_what_promises_no_shorter_step_is_left_out() -> None:
    problem = make_problem(make_cluster(*NODES, limits=FREE), WORKLOAD)
    assert divided_structures(problem, 0.0, 99) == []
    assert len(divided_structures(problem, inf, 3)) == 3


def test_only_where_speed_is_all_that_counts() -> None:
    cluster = make_cluster(*NODES, limits=FREE)
    for objective in (
        Objective("fewest-gpus", num_steps=1, deadline_s=9.0),
        Objective(stock_only=True),
    ):
        assert not make_problem(cluster, WORKLOAD, objective=objective).divides_sequences
    assert not make_problem(make_cluster(*NODES, limits=AS_GIVEN), WORKLOAD).divides_sequences


def test_a_limit_leaves_the_same_grids_in_the_same_order() -> None:
    """Speeds without exchange, which are asked first, never leave out what exact ones let in."""
    problem = make_problem(make_cluster(*NODES, limits=FREE), WORKLOAD)
    found = divided_structures(problem, inf, 99)
    sizes = [len(divided_structures(problem, below_s, 99)) for below_s in (0.01, 0.1, 1.0, 10.0)]
    assert sizes == sorted(sizes)
    for below_s in (0.01, 0.1, 1.0, 10.0):
        fewer = divided_structures(problem, below_s, 99)
        assert fewer == [structure for structure in found if structure in fewer]
        slowest = [s for s in found if s not in fewer][:1]
        assert not slowest or found.index(slowest[0]) == len(fewer)


def test_a_unit_is_never_faster_than_its_slowest_group_alone() -> None:
    problem = make_problem(make_cluster(*NODES, limits=FREE), WORKLOAD)
    for structure in divided_structures(problem, inf, 99):
        for unit in (unit for chain in structure for unit in chain):
            rows = problem.costs.vocab_rows([unit.width])
            assert _layer_at_least_s(problem, unit, rows) <= _layer_s(problem, unit, rows)
