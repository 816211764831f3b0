"""How much of a workload is simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import UsageError
from megatron_hetero.report.text.serving import serving_tables
from megatron_hetero.serving.compose.milp import serve_most, serve_with
from megatron_hetero.serving.fleet.api import planned_fleet
from megatron_hetero.serving.fleet.forecast import LEAST_KEPT_UP, forecast_of, judge, simulate
from megatron_hetero.serving.fleet.offers import make_fleet
from megatron_hetero.serving.fleet.plan import Goal
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.served import load_served
from megatron_hetero.serving.workload.load import load_request_mix
from megatron_hetero.serving.workload.requests import RequestClass, RequestMix, TokenLengths

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving"
CLUSTER = load_cluster(EXAMPLE / "cluster.yaml")
MIX = load_request_mix(EXAMPLE / "workload.yaml")


@pytest.mark.parametrize("rate", [1e-5, 1.0])
def test_a_workload_of_few_requests_is_simulated_for_as_many_as_any(rate: float) -> None:
    kind = replace(MIX.classes[0], rate_per_s=rate)
    poisson = RequestMix((kind,))
    # A trace of 20 requests is shorter than a simulation.
    trace = RequestMix((kind,), tuple(poisson.arrivals(20 / rate, seed=1)))
    one = replace(CLUSTER, nodes=CLUSTER.nodes[:1])
    for mix in (poisson, trace):
        fleet = make_fleet(one, load_served(EXAMPLE, None, "16-bit"), ENGINES["vllm"], mix)
        found = serve_most(fleet.composing())
        outcome, seconds = simulate(fleet, found)
        assert seconds == pytest.approx(500 / rate)
        assert outcome.overall.num_requests == pytest.approx(500, rel=0.15)


def test_answers_of_one_token_are_served() -> None:
    """Decode has a step for them too: a decoder that took no time was no replica of the plan."""
    one = TokenLengths(((1, 1.0),))
    mix = RequestMix((RequestClass("c", 1.0, one, one),))
    first = replace(CLUSTER, nodes=CLUSTER.nodes[:1])
    cluster = first.without([f"{CLUSTER.nodes[0].name}:{index}" for index in (1, 2, 3)])
    plan, _, found = planned_fleet(cluster, load_served(EXAMPLE, None, "16-bit"), mix)
    assert [replica.phase for replica in plan.replicas] == ["both"]
    assert found.run.outcome.overall.num_requests > 1000


def test_a_pipeline_that_falls_behind_is_named_and_holds_nothing() -> None:
    """Batches of a pipeline become unlike; rates alone count them as alike."""
    first = CLUSTER.nodes[0].name
    two = replace(CLUSTER, nodes=CLUSTER.nodes[:1]).without([f"{first}:2", f"{first}:3"])
    mix = replace(MIX, classes=MIX.classes[:1])
    fleet = make_fleet(two, load_served(EXAMPLE, None, "16-bit"), ENGINES["vllm"], mix)
    name = next(n for n in fleet.offered if n.startswith("both") and n.count("tp1:16") == 2)
    found = serve_with(fleet.composing(), {name: 1})
    assert found is not None
    load = 0.9 * found.scale
    run = judge(fleet, found, load)
    assert run.kept_up is not None
    assert run.kept_up < LEAST_KEPT_UP
    # Without deadlines nothing else tells.
    assert run.outcome.holds(0.0)
    assert not run.holds(0.0)
    plan, *_ = planned_fleet(two, fleet.served, mix)
    told = replace(plan, forecast=forecast_of(run, load, 0))
    assert any("falls behind" in str(line) for line in serving_tables(told))
    assert not any("falls behind" in str(line) for line in serving_tables(plan))


def test_a_fleet_is_judged_when_its_batches_are_full() -> None:
    """A brief run at a high rate ended before the first requests did."""
    mix = replace(MIX, classes=MIX.classes[:1])
    one = replace(CLUSTER, nodes=CLUSTER.nodes[:1])
    fleet = make_fleet(one, load_served(EXAMPLE, None, "16-bit"), ENGINES["vllm"], mix)
    found = serve_most(fleet.composing())
    load = 0.9 * found.scale
    brief, brief_s = simulate(fleet, found, load)
    run = judge(fleet, found, load)
    assert run.seconds > brief_s
    assert run.outcome.overall.total_s.mean > 1.1 * brief.overall.total_s.mean
    assert run.kept_up == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("goal", ["cost", "throughput"])
def test_a_class_that_the_solver_takes_for_none_is_refused(goal: Goal) -> None:
    """No replica served it, and the simulation of its requests ended in a LookupError."""
    chat, documents = MIX.classes
    mix = replace(MIX, classes=(chat, replace(documents, rate_per_s=1e-9)))
    one = replace(CLUSTER, nodes=CLUSTER.nodes[:1])
    with pytest.raises(UsageError, match='class "documents": 1e-09 requests a second'):
        planned_fleet(one, load_served(EXAMPLE, None, "16-bit"), mix, goal)
