"""Orders of nodes: the cards of a machine follow each other, whatever their types are."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.by_hand import plans_by_hand
from megatron_hetero.planner.stock.orders import stock_ranks
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.schedule.stock import reasons_not_stock
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

BOX_AMONG_OTHERS = """
version: 1
nodes:
  - {name: a, gpu: A100-40GB, count: 2, link: {bandwidth: 240 GB/s, latency: 5 us}}
  - name: box
    gpus: [{type: A100-80GB, count: 1}, {type: A100-40GB, count: 1}]
    link: {bandwidth: 24 GB/s, latency: 10 us}
  - {name: b, gpu: A100-40GB, count: 4, link: {bandwidth: 240 GB/s, latency: 5 us}}
links:
  between_nodes: {bandwidth: 25 Gb/s, latency: 30 us}
"""


def test_cards_of_a_machine_have_consecutive_ranks_whatever_their_types(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(BOX_AMONG_OTHERS, encoding="utf-8")
    problem = make_problem(
        load_cluster(path),
        make_workload(num_layers=8, global_batch_size=16, use_distributed_optimizer=True),
    )
    machines = {node.name: node.machine for node in problem.cluster.nodes}
    assert len(set(machines.values())) < len(machines)
    every, _ = stock_ranks(problem)
    for ranks in (*every, *stock_ranks(problem, 1)[0]):
        follow = [name for name, _ in groupby(machines[unit.node] for unit in ranks.units)]
        assert len(follow) == len(set(follow))
    assert any(len(ranks.units) == 8 for ranks in every)
    found = best_stock_plan(problem)
    plans = [row.plan for row in plans_by_hand(problem)]
    assert found is not None and len(plans) == 1
    for plan in (found.plan, *found.others, *plans):
        validate_plan(plan, problem.cluster)
        assert reasons_not_stock(plan) == ()


def test_of_odd_nodes_a_power_of_two_is_tried_too() -> None:
    cluster = make_cluster(("a", FAST, 6), ("b", FAST, 3), ("c", SLOW, 1), ("d", SLOW, 2))
    problem = make_problem(cluster, make_workload(num_layers=8, global_batch_size=16))
    ranks, is_complete = stock_ranks(problem, 100)
    assert not is_complete
    orders = [[unit.node for unit in of.units] for of in ranks if of.width == 1]
    # Whole nodes, and the first GPUs of them up to the largest power of two.
    assert ["a"] * 6 in orders and ["a"] * 4 in orders
    assert ["a"] * 6 + ["b"] * 3 in orders and ["a"] * 6 + ["b"] * 2 in orders
    assert len(orders) == len({tuple(order) for order in orders})
