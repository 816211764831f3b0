"""The plan nearest to stock Megatron within a part of the best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.advise.simplest import num_unlike, simplest
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.schedule.stock import is_stock, num_reasons_not_stock
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload

ROOT = Path(__file__).parents[3]
CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 2), limits=FREE)
WORKLOAD = make_workload(num_layers=12, hidden_size=1024, global_batch_size=12)


def test_it_is_within_what_was_asked_and_nearer_to_stock() -> None:
    best = plan_cluster(CLUSTER, WORKLOAD, strategy="columns")
    assert best.estimates is not None
    assert not is_stock(best)
    reasons = num_reasons_not_stock(best)
    for within in (0.02, 0.3, 5.0):
        plan, explanation = plan_and_explain(
            CLUSTER, WORKLOAD, strategy="columns", simplest_within=within
        )
        assert plan.estimates is not None
        assert plan.estimates.step_time_s <= (1 + within) * best.estimates.step_time_s * (1 + 1e-9)
        assert num_reasons_not_stock(plan) <= reasons
        reasons = num_reasons_not_stock(plan)
        if explanation.fastest is not None:
            assert explanation.fastest.step_time_s == pytest.approx(best.estimates.step_time_s)
    assert is_stock(plan), "with so much room, what stock Megatron runs comes first"


def test_no_candidate_of_the_search_is_simpler() -> None:
    board = search(make_problem(CLUSTER, WORKLOAD), None, strategies_of("columns"))
    best = Rescorer(board).best()
    assert best is not None
    found = simplest(board, best, 0.1)
    assert found.step_time_s <= 1.1 * best.step_time_s
    near = [c for c in board.ranking_of_stock if c.step_time_s <= 1.0 * best.step_time_s]
    assert found.is_stock or not near


def test_without_room_it_is_as_fast_as_the_best() -> None:
    board = search(make_problem(CLUSTER, WORKLOAD), None, strategies_of("columns"))
    best = Rescorer(board).best()
    assert best is not None
    assert simplest(board, best, 0.0).step_time_s <= best.step_time_s


def test_things_that_are_alike_do_not_count() -> None:
    equal = make_cluster(("a", FAST, 4))
    board = search(make_problem(equal, WORKLOAD))
    assert board.best is not None
    assert num_unlike(board.best.placement) == 0
    placement = board.best.placement
    groups = (("a",), ("b",))
    assert num_unlike(replace(placement, exchange_groups=groups)) == 1


def test_a_group_that_does_not_divide_the_model_has_no_plain_form() -> None:
    """Three of the RTX 4090 hold 32 heads in one group: only in shares, which plain has not."""
    folder = ROOT / "examples" / "a100-rtx4090"
    whole = load_cluster(folder / "cluster.yaml")
    cluster = replace(whole, limits=replace(whole.limits, idle_devices=("a100-0",)))
    flags = ("--num-layers=11", "--global-batch-size=4")
    workload = load_workload(folder / "gpt-7b.sh", flags)
    board = search(make_problem(cluster, workload))
    best = Rescorer(board).best()
    assert best is not None
    stages = [s for c in board.ranking_of_all for r in c.placement.replicas for s in r.stages]
    assert any(stage.width == 3 for stage in stages)
    assert simplest(board, best, 0.5).standing.value <= 1.5 * best.standing.value
