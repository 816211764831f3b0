"""Like stages and messages of stock grids have one price, whichever of them is priced."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.cost.placement import PlacedExperts
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.stock.prices import StockPrices
from megatron_hetero.schedule.network import crossing
from tests.cost.network.test_nics import several
from tests.planner.stock.test_bounds import drawn_case, problems


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.sampled_from(["plain", "cards", "uplinks"]), st.data())
def test_like_stages_and_messages_take_what_the_price_list_says(
    problem: Problem, network: str, data: st.DataObject
) -> None:
    cluster = problem.cluster
    if network == "cards":
        assume(all(node.num_gpus <= 4 for node in cluster.nodes))
        cluster = several(cluster, 2)
    if network == "uplinks":
        nodes = enumerate(cluster.nodes, 1)
        unlike = (replace(node, uplink_bytes_per_s=i * 1e9) for i, node in nodes)
        cluster = replace(cluster, nodes=tuple(unlike))
    problem = make_problem(cluster, problem.workload)
    assume(problem.nodes)
    _, case = drawn_case(problem, data)
    grid, groups = case.grid, case.settings.expert_groups
    prices = StockPrices(problem).of(grid, case.settings)
    rows, together = prices.plain.vocab_rows([grid.width]), grid.together(groups)
    numbers = prices.prices.likes.stages(grid, groups)
    for d in range(grid.num_replicas):
        for p in range(grid.num_stages):
            stage = grid.stage(d, p).stage
            if groups is not None:
                first = d // together * together
                units = [grid.stage(r, p) for r in range(first, first + together)]
                devices = tuple(device for unit in units for device in unit.devices)
                stage = replace(stage, experts=PlacedExperts(groups, devices))
            expected = prices.plain.stage_pieces(stage, rows)
            layer, embedding, head = prices.pieces(int(numbers[d, p]))
            assert layer == expected.layer
            # A single stage has both ends of a tied weight.
            tied_s = expected.tied_s if grid.num_stages == 1 else 0.0
            assert embedding == expected.embedding
            assert head == expected.head + PassTimes(0.0, tied_s)
    waits = problem.workload.training.stock_waits
    for is_back, messages in enumerate(prices.prices.likes.messages(grid)):
        for d, p in product(range(grid.num_replicas), range(grid.num_stages - 1)):
            ends = [grid.stage(d, own).stage for own in (p, p + 1)]
            made = crossing(prices.plain, ends[is_back], ends[1 - is_back], waits)
            expected_s = made.serialisation_s, made.latency_s
            assert prices.prices.crossing_s(prices, int(messages[d, p])) == expected_s
