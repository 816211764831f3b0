"""HexiScale's algorithm: valid plans, always the same, better than the released search's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.planner.answer.planned import plan_of
from megatron_hetero.planner.hexiscale.strategy import HexiScale
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.strategies import clusters, workloads
from tools.bench.search.planners import CASES
from tools.referees.cases import load_case


@settings(max_examples=25, deadline=None)
@given(clusters(max_gpus=8), workloads(max_layers=8, max_micro_batches=8))
def test_its_plans_are_valid(cluster: Cluster, workload: Workload) -> None:
    problem = make_problem(cluster, workload)
    best = search(problem, strategies=strategies_of("hexiscale")).best
    if best is None:
        return
    used = {device.name for device in best.placement.devices()}
    idle = {d.name: "" for d in cluster.devices if d.name not in used}
    plan = plan_of(problem, best, idle)
    validate_plan(plan, cluster)
    assert "hexiscale" in plan.made_by


def test_the_order_of_the_nodes_does_not_count() -> None:
    nodes = [("a", FAST, 4), ("b", SLOW, 4), ("c", SLOW, 2), ("d", FAST, 2)]
    workload = make_workload(num_layers=8, global_batch_size=16)
    found = set()
    for seed in range(4):
        random.Random(seed).shuffle(nodes)
        problem = make_problem(make_cluster(*nodes), workload)
        best = search(problem, strategies=[HexiScale()]).best
        assert best is not None
        found.add(best.placement)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("case", "released_s"),
    [
        ("h1", 14.15),
        ("h2", 23.49),
        ("h3", 71.89),
        pytest.param("h4", 115.69, marks=pytest.mark.slow),
        pytest.param("h5", 126.08, marks=pytest.mark.slow),
    ],
)
def test_it_beats_the_released_search_under_the_released_cost_model(
    case: str, released_s: float
) -> None:
    question = load_case(CASES / f"hexiscale-{case}.yaml").questions[0]
    problem = make_problem(question.cluster, question.workload, None, question.make_costs)
    best = search(problem, strategies=[HexiScale()]).best
    assert best is not None
    score = question.score(best.placement)
    assert score.missing_bytes <= 0
    assert score.step_s == pytest.approx(best.step_time_s)
    assert score.step_s < released_s
