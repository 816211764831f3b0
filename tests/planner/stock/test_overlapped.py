"""The search for the best of stock where the exchange overlaps with passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.limits import BESIDE_A_PLAN, limits_beside_a_plan
from megatron_hetero.planner.stock.search import best_stock_plan
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload


@pytest.mark.parametrize("is_divided", [False, True])
def test_what_overlaps_counts_before_plans_are_simulated(is_divided: bool) -> None:
    """On a slow network, with the few simulations that a plan to be compared with has."""
    nodes = [(f"n{i}", FAST if i % 2 else SLOW, 4) for i in range(4)]
    cluster = make_cluster(*nodes, between=Link(1e9, 3e-5), limits=FREE)
    workload = make_workload(
        num_layers=16,
        hidden_size=1024,
        ffn_hidden_size=4096,
        global_batch_size=64,
        use_distributed_optimizer=is_divided,
    )
    plain, overlapped = (
        best_stock_plan(
            make_problem(
                cluster,
                replace(
                    workload, training=replace(workload.training, overlap_grad_reduce=overlaps)
                ),
            ),
            limits_beside_a_plan(16),
        )
        for overlaps in (False, True)
    )
    assert plain is not None and overlapped is not None
    # What hides some of the exchange makes no step longer.
    assert overlapped.step_time_s <= plain.step_time_s * (1 + BESIDE_A_PLAN.tolerance)
