"""Bounds of money, GPUs and of steps that money allows: below every plan, and near the best."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.price import price_of
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.objectives import objective_bound as module
from megatron_hetero.planner.objectives.objective_bound import (
    WORK_RELAXES,
    none_keeps_the_limits,
    objective_bound,
)
from megatron_hetero.planner.problem import Problem, make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import all_placements

WORKLOAD = make_workload(num_layers=3, global_batch_size=4)
Plan = tuple[float, float, int]
"""Seconds of a step, money for it, GPUs."""


def priced(fast: float = 2.0, slow: float = 1.0, counts: tuple[int, int] = (1, 2)) -> Cluster:
    cluster = make_cluster(("a", FAST, counts[0]), ("b", SLOW, counts[1]))
    prices = {"a": fast, "b": slow}
    nodes = tuple(replace(n, gpu_price_per_hour=prices[n.name]) for n in cluster.nodes)
    return replace(cluster, nodes=nodes)


def problem_of(
    objective: Objective, cluster: Cluster | None = None, limit: float | None = None
) -> Problem:
    cluster = cluster or priced()
    if limit is not None:
        cluster = replace(cluster, limits=replace(cluster.limits, max_price_per_hour=limit))
    return make_problem(cluster, WORKLOAD, objective=objective)


def all_plans(problem: Problem) -> list[Plan]:
    found = []
    for placement in all_placements(problem.cluster, WORKLOAD, problem.costs):
        cost = problem.costs.placement(placement)
        price = price_of(problem.costs, placement, cost)
        if cost.missing_bytes <= 0 and price is not None:
            num = len(list(placement.devices()))
            found.append((cost.step_time_s, price.of_step(cost.step_time_s), num))
    return found


def value_s(problem: Problem) -> float:
    bound = objective_bound(problem)
    assert bound is not None
    return bound.value


@pytest.mark.parametrize("fast", [0.5, 2.0, 4.0])
def test_no_plan_is_cheaper_than_its_bound(fast: float) -> None:
    problem = problem_of(Objective("cheapest"), priced(fast))
    least = min(money for _, money, _ in all_plans(problem))
    assert 0.7 * least <= value_s(problem) <= least * (1 + 1e-9)


@pytest.mark.parametrize("slack", [1.0, 1.5, 3.0, 50.0])
def test_no_plan_in_time_has_fewer_gpus(slack: float) -> None:
    plans = all_plans(problem_of(Objective()))
    deadline_s = slack * min(plans)[0] * (1 + 1e-9)
    problem = problem_of(Objective("fewest-gpus", 1, deadline_s))
    fewest = min(num for step_s, _, num in plans if step_s <= deadline_s)
    assert 1 <= value_s(problem) <= fewest
    if slack == 50.0:
        assert value_s(problem) == 1


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.5, 10.0])
def test_no_step_within_a_price_is_shorter(limit: float) -> None:
    problem = problem_of(Objective(), limit=limit)
    plans = all_plans(problem)
    within = [s for s, money, _ in plans if money / s * 3600 <= limit * (1 + 1e-9)]
    assert 0.7 * min(within) <= value_s(problem) <= min(within) * (1 + 1e-9)


def test_tighter_limits_never_bound_less() -> None:
    steps_s = [value_s(problem_of(Objective(), limit=limit)) for limit in (4.0, 3.0, 2.0, 1.0)]
    assert steps_s == sorted(steps_s) and steps_s[0] < steps_s[-1]


def test_limits_that_none_keeps_are_infinite() -> None:
    nothing = problem_of(Objective(), limit=0.5)  # less than any GPU costs
    assert value_s(nothing) == inf
    assert none_keeps_the_limits(nothing)
    assert not none_keeps_the_limits(problem_of(Objective(), limit=1.0))
    assert none_keeps_the_limits(problem_of(Objective("fewest-gpus", 1, 1e-9)))


def test_a_deadline_alone_is_proved_by_the_step_times_bound() -> None:
    fastest_s = min(all_plans(problem_of(Objective())))[0]
    assert objective_bound(problem_of(Objective(num_steps=1, deadline_s=1.0))) is None
    assert none_keeps_the_limits(problem_of(Objective(num_steps=1, deadline_s=fastest_s / 2)))
    assert not none_keeps_the_limits(problem_of(Objective(num_steps=1, deadline_s=fastest_s)))


def test_throughput_without_limits_has_no_bound_of_its_own() -> None:
    assert objective_bound(problem_of(Objective())) is None
    assert not none_keeps_the_limits(problem_of(Objective()))


@settings(max_examples=15)
@given(
    st.sampled_from([0.5, 2.0, 4.0]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from(["cheapest", "fewest-gpus"]),
)
def test_bounds_by_work_alone_are_below_those_of_selections(
    fast: float, num_fast: int, num_slow: int, name: str
) -> None:
    objective = Objective(name, 1, 0.02) if name == "fewest-gpus" else Objective("cheapest")  # type: ignore[arg-type]
    problem = problem_of(objective, priced(fast, counts=(num_fast, num_slow)))
    tight = objective_bound(problem)
    assume(tight is not None and tight.value < inf)
    assert tight is not None
    loose = module._by_work(problem, module.node_pools(problem))
    assert loose is not None and loose.relaxes == WORK_RELAXES
    assert 0 < loose.value <= tight.value * (1 + 1e-9)


def test_very_many_selections_are_bounded_by_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(Objective("cheapest"))
    tight = objective_bound(problem)
    monkeypatch.setattr(module, "MAX_SELECTIONS", 2)
    loose = objective_bound(problem)
    assert tight is not None and loose is not None
    assert loose.relaxes == WORK_RELAXES != tight.relaxes
    assert loose.value <= tight.value
    assert objective_bound(problem_of(Objective(), limit=2.0)) is None


def test_without_tight_bounds_selections_promise_their_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = problem_of(Objective("cheapest"))
    tight = value_s(problem)
    monkeypatch.setattr(module, "_MAX_WORK", 0)
    assert value_s(problem) <= tight
    found = objective_bound(problem)
    assert found is not None and found.relaxes == WORK_RELAXES
