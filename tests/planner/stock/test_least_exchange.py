"""The least exchange of gradients and weights is below the real one, and near it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import expert_groups
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.stock.exchange import exchange_lines
from megatron_hetero.planner.stock.forms import groups_fit_grid
from megatron_hetero.planner.stock.grids import StockGrid, grids_of
from megatron_hetero.planner.stock.least_exchange import least_exchange
from megatron_hetero.planner.stock.orders import stock_ranks
from tests.cost.builders import FREE, make_cluster, make_workload
from tests.cost.network.test_nics import several
from tests.planner.stock.test_bounds import SLACK, problems


def seconds(
    problem: Problem, grid: StockGrid, groups: tuple[int, int] | None, num_layers: int
) -> list[tuple[float, float]]:
    """Least and real seconds of each stage, with so many layers on each."""
    rows = problem.costs.vocab_rows([grid.width])
    least = least_exchange(grid, problem.costs, rows, groups)
    real = exchange_lines(grid, problem.costs, rows, groups)
    return [
        (zero_s + num_layers * each_s, a + b + num_layers * (c + d))
        for (zero_s, each_s), (a, c), (b, d) in zip(
            least, real.gradients, real.weights, strict=True
        )
    ]


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.data())
def test_the_least_exchange_is_no_longer_than_the_real_one(
    problem: Problem, data: st.DataObject
) -> None:
    assume(problem.nodes)
    ranks = data.draw(st.sampled_from(stock_ranks(problem, 100)[0]))
    contexts = [n for n in (1, 2) if len(ranks.units) % n == 0]
    grids = list(grids_of(problem, ranks, data.draw(st.sampled_from(contexts))))
    assume(grids)
    grid = data.draw(st.sampled_from(grids))
    num_gpus = len(ranks.units) * ranks.width
    every = (None, *expert_groups(problem.costs, ranks.width, num_gpus))
    fitting = [own for own in every if groups_fit_grid(grid, own)]
    assume(fitting)
    groups = data.draw(st.sampled_from(fitting))
    for num_layers in (1, 2, 7):
        for least_s, real_s in seconds(problem, grid, groups, num_layers):
            assert 0 <= least_s <= real_s * SLACK


def four_nodes(latency_s: float) -> Cluster:
    nodes = [(f"n{i}", gpu_type("H100-80GB"), 4) for i in range(4)]
    inside = Link(3e11, latency_s)
    return make_cluster(*nodes, between=Link(5e9, latency_s), inside=inside, limits=FREE)


JOB = make_workload(
    num_layers=8,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=512,
    global_batch_size=16,
    use_distributed_optimizer=True,
    sequence_parallel=True,
)


@pytest.mark.parametrize("groups", [None, (2, 1), (8, 1)])
@pytest.mark.parametrize("num_nics", [1, 2, 4])
def test_network_cards_of_a_machine_carry_no_more_than_all_together(
    groups: tuple[int, int] | None, num_nics: int
) -> None:
    problem = make_problem(several(four_nodes(1e-5), num_nics), JOB)
    grids = [
        grid
        for ranks in stock_ranks(problem, 100)[0]
        if len(ranks.units) in (8, 16)
        for grid in grids_of(problem, ranks, 1)
        if groups_fit_grid(grid, groups)
    ]
    pairs = [pair for grid in grids for pair in seconds(problem, grid, groups, 2)]
    assert all(least_s <= real_s * SLACK for least_s, real_s in pairs)
    # The cards are what takes longest, and they are in the bound.
    assert max(least_s / real_s for least_s, real_s in pairs if real_s) > 0.9


@pytest.mark.parametrize("groups", [None, (2, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-pp-dp"])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_without_latencies_both_are_equal(
    groups: tuple[int, int] | None, order: str, width: int, in_fp8: bool
) -> None:
    """Rings over nodes, of the experts of one replica and of several."""
    training = replace(JOB.training, fp8=in_fp8, fp8_param_gather=in_fp8)
    problem = make_problem(four_nodes(0.0), replace(JOB, training=training))
    grids = [
        grid
        for ranks in stock_ranks(problem, 100)[0]
        if len(ranks.units) * ranks.width == 16 and ranks.width == width
        for grid in grids_of(problem, ranks, 1)
        if grid.num_stages == 2 and grid.rank_order == order
    ]
    assert grids
    for grid in grids:
        if groups_fit_grid(grid, groups):
            for least_s, real_s in seconds(problem, grid, groups, 4):
                assert least_s == pytest.approx(real_s, rel=1e-6) and least_s > 0
