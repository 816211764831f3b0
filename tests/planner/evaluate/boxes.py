"""Two nodes of each of two kinds of GPUs, over one network."""

from __future__ import annotations

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.planner.problem import Problem, make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

BETWEEN = Link(1e9, 1e-5)


def problem_of(num_gpus: int) -> Problem:
    """Return the problem of a small model on nodes of so many GPUs."""
    kinds = {"a": FAST, "b": FAST, "c": SLOW, "d": SLOW}
    nodes = [(name, gpu, num_gpus) for name, gpu in kinds.items()]
    return make_problem(
        make_cluster(*nodes, between=BETWEEN), make_workload(num_layers=8, global_batch_size=16)
    )
