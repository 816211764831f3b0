"""Grids on part of the GPUs: which machines they lie on."""

from __future__ import annotations

import pytest

from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.symmetric import grids, node_groups
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=4, global_batch_size=12)


@pytest.mark.parametrize("counts", [(6, 2, 3), (2, 6, 3), (3, 2, 6)])
def test_a_grid_of_few_gpus_lies_on_the_largest_machines(counts: tuple[int, ...]) -> None:
    """Whatever the machines are called."""
    nodes = [(name, FAST, count) for name, count in zip("abc", counts, strict=True)]
    problem = make_problem(make_cluster(*nodes), WORKLOAD)
    largest = "abc"[counts.index(6)]
    (group,) = node_groups(problem)
    assert [len(node.devices) for node in group] == [6, 3, 2]
    of_six = [grid for grid in grids(problem) if sum(map(len, grid)) == 6]
    assert {unit.node for grid in of_six for chain in grid for unit in chain} == {largest}


def test_with_several_types_the_largest_of_each_come_first() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 2), ("c", FAST, 2), ("d", SLOW, 4))
    found = [
        [node.name for node in group] for group in node_groups(make_problem(cluster, WORKLOAD))
    ]
    assert found[:2] == [["c", "a"], ["d", "b"]]
    assert ["c", "a", "d", "b"] in found[2:]
