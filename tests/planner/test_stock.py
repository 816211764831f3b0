"""Plans that stock Megatron can run come out as such, and are compared with honestly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.stock_ranks import rank_orders
from megatron_hetero.planner import plan_and_explain
from megatron_hetero.planner.advise.idle import idle_reasons
from megatron_hetero.planner.evaluate.canonical import canonical
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.schedule.stock import is_stock, reasons_not_stock
from tests.cost.builders import FAST, FREE, INSIDE, SLOW, make_cluster, make_workload
from tests.planner.strategies import clusters, workloads


@settings(max_examples=40, deadline=None)
@given(clusters(max_gpus=5), workloads(max_layers=6, max_micro_batches=8))
def test_the_best_of_stock_megatron_runs_on_stock_megatron(
    cluster: Cluster, workload: Workload
) -> None:
    problem = make_problem(cluster, workload)
    board = search(problem)
    for candidate in (board.best_stock, board.best):
        if candidate is not None:
            plan = bare_plan(problem, candidate, idle_reasons(problem, candidate))
            validate_plan(plan, cluster)
            assert is_stock(plan) == (candidate.rank_order is not None)
            if candidate.rank_order is not None:
                assert candidate.rank_order in rank_orders(plan)


@pytest.mark.parametrize("nodes", [("a", "b"), ("a", "b", "c", "d")])
def test_equal_nodes_need_no_plug_in(nodes: tuple[str, ...]) -> None:
    """As `plan` chooses: a plan that needs the plug-in gives way to stock's best within 2 %."""
    cluster = make_cluster(*((name, FAST, 4) for name in nodes), between=INSIDE, limits=FREE)
    job = make_workload(num_layers=16, global_batch_size=64)
    plan, _ = plan_and_explain(cluster, job, plugin_gain=0.02)
    assert reasons_not_stock(plan) == ()


def test_a_plan_that_stock_megatron_cannot_number_is_not_called_stock() -> None:
    """Thin first and last stages on the slow node: the best, but no order of two nodes."""
    cluster = make_cluster(("fast", FAST, 2), ("slow", SLOW, 2))
    problem = make_problem(cluster, make_workload(num_layers=8, global_batch_size=8))
    board = search(problem, strategies=[])
    stages = [("slow", 0, 1), ("fast", 0, 3), ("fast", 1, 3), ("slow", 1, 1)]
    placed = tuple(PlacedStage((Device(node, index),), n) for node, index, n in stages)
    candidate = board.score(Placement((PlacedReplica(placed, 8),)), "given")
    assert candidate is not None and candidate.rank_order is None
    assert board.ranking[0] is candidate and board.best_stock is None


def test_a_shortage_names_the_nearest_plan_of_stock_megatron() -> None:
    """Embedding and output layer need the width 2 that the single GPU of the other node lacks."""
    cluster = make_cluster(
        ("big", replace(FAST, memory_bytes=300 << 20), 2),
        ("one", replace(SLOW, memory_bytes=400 << 20), 1),
    )
    workload = make_workload(num_layers=6, global_batch_size=8, vocab_size=30000)
    plan, explanation = plan_and_explain(cluster, workload)
    assert format_layout(plan.layout) == "tp1:2,tp2:4 @8"
    assert explanation.best_stock is None
    short = explanation.stock_shortage
    assert short is not None
    assert (short.layout, short.devices, short.gpu_type) == (
        "tp2:6 @8", ("big:0", "big:1"), "FAST",
    )  # fmt: skip
    assert 0 < short.missing_bytes < 40 << 20


@given(st.permutations([0, 1, 2, 3]), st.permutations(["a", "b"]))
def test_equal_gpus_and_replicas_have_one_form(indices: list[int], order: list[str]) -> None:
    """Whichever of the equal GPUs and in whichever order the replicas were found."""
    stages = {
        "a": [PlacedStage((Device("n", indices[0]), Device("n", indices[1])), 4)],
        "b": [PlacedStage((Device("n", indices[2]), Device("n", indices[3])), 4)],
    }
    placement = Placement(tuple(PlacedReplica(tuple(stages[name]), 2) for name in order))
    found, rank_order = canonical(placement, {"n": (0, 1, 2, 3)})
    assert rank_order == "tp-dp-pp"
    assert [device.index for device in found.devices()] == [0, 1, 2, 3]
