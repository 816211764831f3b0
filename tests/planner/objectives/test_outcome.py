"""What a plan means for a whole run, and what is said when none keeps the limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.objectives.outcome import (
    Outcome,
    _limit,
    _rounded_up,
    limits_error,
    outcome_of,
)
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=4, global_batch_size=4)  # 4 sequences of 256 tokens
TOKENS = 4 * 256


def boxes(price: float | None = 2.0, limit: float | None = None) -> Cluster:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 2))
    nodes = tuple(replace(node, gpu_price_per_hour=price) for node in cluster.nodes)
    limits = replace(cluster.limits, max_price_per_hour=limit)
    return replace(cluster, nodes=nodes, limits=limits)


def planned(
    objective: Objective, cluster: Cluster | None = None
) -> tuple[Problem, Scoreboard, Candidate]:
    problem = make_problem(cluster or boxes(), WORKLOAD, objective=objective)
    board = Scoreboard(problem)
    Constructive().search(board)
    assert board.nearest is not None
    return problem, board, board.nearest


def outcome(objective: Objective, cluster: Cluster | None = None) -> tuple[Outcome, Candidate]:
    problem, board, best = planned(objective, cluster)
    return outcome_of(problem, board, best), best


def test_a_run_by_hand() -> None:
    """A thousand steps on GPUs of 2 an hour each."""
    found, best = outcome(Objective(num_steps=1000.0))
    num_gpus = len(list(best.placement.devices()))
    step_s = best.step_time_s
    assert found.value == step_s
    assert found.num_tokens == 1000 * TOKENS
    assert found.run_hours == pytest.approx(1000 * step_s / 3600)
    assert found.price_per_hour == 2.0 * num_gpus
    assert found.run_price == pytest.approx(2.0 * num_gpus * 1000 * step_s / 3600)
    assert found.run_traffic_price == 0.0
    assert found.bound is None and found.gap is None  # the step time's own bound is elsewhere


def test_without_prices_or_steps_they_are_not_known() -> None:
    found, _ = outcome(Objective(), boxes(None))
    assert found.price_per_hour is None and found.run_price is None
    assert (found.num_steps, found.num_tokens, found.run_hours) == (None, None, None)
    assert (found.deadline_hours, found.budget, found.max_price_per_hour) == (None, None, None)
    half, _ = outcome(Objective(num_steps=10.0), boxes(None))
    assert half.run_price is None and half.run_hours is not None


def test_the_cheapest_is_by_a_million_tokens() -> None:
    found, best = outcome(Objective("cheapest"))
    num_gpus = len(list(best.placement.devices()))
    of_step = 2.0 * num_gpus * best.step_time_s / 3600
    assert found.value == pytest.approx(of_step / TOKENS * 1e6)
    assert found.bound is not None and 0 < found.bound <= found.value
    assert found.gap == pytest.approx(found.value / found.bound - 1)
    assert found.bound_relaxes
    assert found.bound_with_context_parallel is None  # the boxes' limits keep sequences whole


def test_the_fewest_gpus_are_counted() -> None:
    found, best = outcome(Objective("fewest-gpus", 1, 3600.0))
    assert found.value == len(list(best.placement.devices()))
    assert found.bound is not None and 1 <= found.bound <= found.value
    assert found.deadline_hours == 1.0


def test_an_exact_search_has_no_gap() -> None:
    for objective in (Objective(), Objective("cheapest"), Objective("fewest-gpus", 1, 3600.0)):
        problem, board, best = planned(objective)
        board.is_exact = True
        found = outcome_of(problem, board, best)
        assert found.gap == pytest.approx(0.0)
        assert found.bound == pytest.approx(found.value)
        assert found.bound_relaxes == "nothing: every plan was priced"


def test_limits_are_said_as_they_were_given() -> None:
    found, _ = outcome(Objective("throughput", 100.0, 7200.0, 5.0), boxes(limit=9.0))
    assert (found.deadline_hours, found.budget, found.max_price_per_hour) == (2.0, 5.0, 9.0)


def test_what_no_plan_keeps_is_named_with_what_the_nearest_would_keep() -> None:
    problem, _, nearest = planned(Objective(num_steps=1e6, deadline_s=3.6))
    text = str(limits_error(problem, nearest))
    needed_h = 1e6 * nearest.step_time_s / 3600
    assert "No plan was found that keeps --deadline 0.001 h." in text
    assert "That none can is proved, by a lower bound." in text
    assert f"on {len(list(nearest.placement.devices()))} GPUs of " in text
    assert "Allow that, or give more or other machines." in text
    said_h = float(text.split("would keep --deadline ")[1].split(" h")[0])
    assert needed_h <= said_h <= needed_h * 1.002


def test_limits_that_the_nearest_keeps_are_not_asked_for() -> None:
    problem, _, nearest = planned(Objective("throughput", 1000.0, None, 1e-6), boxes(limit=1000.0))
    text = str(limits_error(problem, nearest, "plan of stock Megatron"))
    assert "No plan of stock Megatron was found that keeps" in text
    kept, wanted = text.split("would keep")
    assert "limits.max_price_per_hour 1000" in kept and "--budget 1e-06" in kept
    assert "limits.max_price_per_hour" not in wanted and "--budget" in wanted


def test_what_is_only_not_found_is_not_said_to_be_proved() -> None:
    """The limit is the best step found: no bound is above it."""
    problem, board, nearest = planned(Objective())
    objective = Objective(num_steps=1.0, deadline_s=board.nearest.step_time_s * 0.999)  # type: ignore[union-attr]
    assert "proved" not in str(limits_error(replace(problem, objective=objective), nearest))


@given(st.floats(1e-6, 1e9))
def test_limits_are_rounded_up_to_four_figures(value: float) -> None:
    rounded = _rounded_up(value)
    assert value <= rounded <= value * 1.0015


def test_a_limit_that_is_kept_stays_as_it_is() -> None:
    assert _limit("--deadline", 2.0, 1.5) == ("--deadline", "2 h", "2 h")
    assert _limit("--budget", 100.0, 123.456) == ("--budget", "100", "123.5")
    assert _limit("--deadline", 1.0, 1.23401) == ("--deadline", "1 h", "1.235 h")
