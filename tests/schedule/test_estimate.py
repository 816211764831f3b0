"""What a step of stock Megatron takes, priced whole and in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.grids import StockGrid, grids_of
from megatron_hetero.planner.stock.orders import stock_ranks
from megatron_hetero.planner.stock.plan import stock_plan
from megatron_hetero.planner.stock.settings import StockSettings
from megatron_hetero.schedule import estimate
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 4), between=Link(3e9, 2e-5), limits=FREE)
PLAIN = make_workload(num_layers=8, global_batch_size=64, hidden_size=1024)


def long_plan(**flags: bool) -> Plan:
    training = replace(PLAIN.training, **flags)  # type: ignore[arg-type]
    problem = make_problem(CLUSTER, replace(PLAIN, training=training))
    grid: StockGrid = next(
        grid
        for ranks in stock_ranks(problem)[0]
        if ranks.width == 1 and len(ranks.units) == 8
        for grid in grids_of(problem, ranks, 1)
        if grid.num_stages == 2 and grid.rank_order == "tp-pp-dp"
    )
    return stock_plan(StockCase(problem, grid, StockSettings(1, "none", 1)), (5, 3), 0)


@pytest.mark.parametrize(
    ("flags", "apart"),
    [
        ({}, 1e-6),
        ({"use_distributed_optimizer": True}, 1e-6),
        ({"overlap_grad_reduce": True}, 0.01),
        (
            {
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
            0.02,
        ),
    ],
)
def test_a_step_too_long_to_simulate_has_stock_megatrons_own_exchange(
    flags: dict[str, bool], apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = long_plan(**flags)
    assert plan.workload is not None
    costs = CostModel(CLUSTER, plan.workload)
    placement = placement_of(plan, CLUSTER)
    step_s = simulate_plan(plan, CLUSTER).step_time_s
    assert estimate.plan_cost(plan, costs, placement).step_time_s == pytest.approx(step_s)
    monkeypatch.setattr(estimate, "_MAX_STOCK_MESSAGES", 0)
    cost = estimate.plan_cost(plan, costs, placement)
    assert cost.gradient_sync_s > 0.02 * step_s
    assert cost.step_time_s == pytest.approx(step_s, rel=apart)
