"""Small pools of nodes, and what column generation knows of them."""

from __future__ import annotations

from megatron_hetero.planner.columns.pricing import BundlePricer, StageTable
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.shapes.kinds import kinds_of
from tests.cost.builders import make_cluster, make_workload


def problem_of(*nodes: tuple, num_layers: int = 8) -> Problem:
    workload = make_workload(num_layers=num_layers, global_batch_size=16)
    return make_problem(make_cluster(*nodes), workload)


def pricer_of(problem: Problem, num_replicas: int) -> tuple[StageTable, BundlePricer]:
    table = StageTable(problem, kinds_of(problem))
    return table, BundlePricer(table, range(len(table.kinds)), num_replicas, 8)


def capacity(table: StageTable) -> dict[int, int]:
    return {k: len(kind.nodes) for k, kind in enumerate(table.kinds)}
