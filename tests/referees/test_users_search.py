"""The users' search under prices of other pipelines: a stage has one setting, and sends itself."""

from __future__ import annotations

import pytest

from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Unit
from tools.bench.search.planners import CASES
from tools.referees.cases import load_case


def problem_of(case: str, question: int = 0) -> Problem:
    asked = load_case(CASES / f"{case}.yaml").questions[question]
    return make_problem(asked.cluster, asked.workload, None, asked.make_costs)


@pytest.mark.parametrize(("case", "num_stages"), [("hexiscale-h1", 8), ("sailor-s01", 4)])
def test_a_completed_replica_takes_what_it_is_priced_at(case: str, num_stages: int) -> None:
    """Sends count as the stages' own time, so that layers suit the stages as they are priced."""
    problem = problem_of(case)
    gpus = [(node.name, index) for node in problem.nodes for index in problem.gpus[node.name]]
    chain = tuple(Unit(node, (index,)) for node, index in gpus[:num_stages])
    completer = Completer(problem)
    found = completer.complete((chain,), completer.own_size)
    assert found is not None
    cost = problem.costs.placement(found.placement(completer.own_size))
    assert found.quick_s == pytest.approx(cost.replicas[0].pipeline_s)
    # The recurrence of our own pipelines has nothing to say about others.
    assert completer.tune(found, 10**6) is found


def test_a_case_is_planned_as_fast_as_its_anchor() -> None:
    case = load_case(CASES / "hexiscale-h2.yaml")
    best = search(problem_of("hexiscale-h2")).best
    assert best is not None
    step_s = case.questions[0].score(best.placement).step_s
    assert case.ratio(step_s) > 0.9995
    assert not best.placement.has_shares
