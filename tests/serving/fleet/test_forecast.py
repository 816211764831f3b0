"""How much of a workload is simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.report.text.serving import serving_tables
from megatron_hetero.serving.compose.milp import serve_most
from megatron_hetero.serving.fleet.api import planned_fleet
from megatron_hetero.serving.fleet.forecast import LEAST_KEPT_UP, judge, simulate
from megatron_hetero.serving.fleet.offers import make_fleet
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


def test_a_pipeline_that_falls_behind_is_named_and_is_no_cheapest_fleet() -> None:
    """Batches of a pipeline become unlike; rates alone count them as alike."""
    # Two cards that hold the model together only, and no deadline that would tell.
    served = load_served(EXAMPLE, None, "16-bit")
    served = replace(served, model=replace(served.model, num_layers=110))
    first = CLUSTER.nodes[0].name
    cluster = replace(CLUSTER, nodes=CLUSTER.nodes[:1]).without([f"{first}:2", f"{first}:3"])
    cluster = replace(cluster, limits=replace(cluster.limits, max_tensor_parallel=1))
    lengths = TokenLengths(((200, 1.0),))
    mix = RequestMix((RequestClass("c", 1.0, lengths, lengths),))
    plan, *_ = planned_fleet(cluster, served, mix)
    assert [len(replica.stages) for replica in plan.replicas] == [2]
    assert plan.forecast is not None
    assert plan.forecast.kept_up is not None
    assert plan.forecast.kept_up < LEAST_KEPT_UP
    assert any("falls behind" in str(line) for line in serving_tables(plan))
    kind = replace(mix.classes[0], rate_per_s=0.97 * plan.scale)
    with pytest.raises(InfeasiblePlanError, match="keeps up"):
        planned_fleet(cluster, served, RequestMix((kind,)), "cost")


def test_a_fleet_is_judged_when_its_batches_are_full() -> None:
    """A brief run at a high rate ended before the first requests did."""
    mix = replace(MIX, classes=MIX.classes[:1])
    one = replace(CLUSTER, nodes=CLUSTER.nodes[:1])
    fleet = make_fleet(one, load_served(EXAMPLE, None, "16-bit"), ENGINES["vllm"], mix)
    found = serve_most(fleet.composing())
    load = 0.9 * found.scale
    brief, brief_s = simulate(fleet, found, load)
    run = judge(fleet, found, load)
    assert brief.kept_up < 0.75
    assert run.seconds > brief_s
    assert run.kept_up == pytest.approx(1.0, abs=0.1)
