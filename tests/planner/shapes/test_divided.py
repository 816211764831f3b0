"""Starts whose stages divide sequences: grids on the nodes' GPUs, none that promises too little."""

from __future__ import annotations

from math import inf

from megatron_hetero.planner.objectives.objective import Objective
from megatron_hetero.planner.problem import Unit, make_problem
from megatron_hetero.planner.shapes.divided import divided_structures
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
