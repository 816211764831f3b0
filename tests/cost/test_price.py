from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.price import price_of, price_per_hour
from megatron_hetero.errors import UsageError
from megatron_hetero.plan.checks.cluster import price_limit_holds
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.objective import Objective
from megatron_hetero.report.text.terminal import plan_report
from tests.cost.builders import (
    CLUSTER,
    FAST,
    SLOW,
    estimate_plan,
    make_cluster,
    make_workload,
    place,
)


def priced(cluster: Cluster, **prices: tuple[float | None, float | None]) -> Cluster:
    """The cluster with (machine, GPU) prices by node."""
    nodes = tuple(
        replace(
            node,
            price_per_hour=prices.get(node.name, (None, None))[0],
            gpu_price_per_hour=prices.get(node.name, (None, None))[1],
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def test_machines_are_paid_whole_and_gpus_each() -> None:
    cluster = priced(CLUSTER, a=(5.0, 9.0), b=(None, 1.5))
    a, b = cluster.devices[:2], cluster.devices[2:]
    assert price_per_hour(cluster, a[:1]) == price_per_hour(cluster, a) == 5.0
    assert price_per_hour(cluster, [*a, b[0]]) == 6.5
    assert price_per_hour(cluster, [*a, *b]) == 8.0
    assert price_per_hour(priced(CLUSTER, a=(5.0, None)), [*a, *b]) is None


def test_a_million_tokens_cost_machines_for_their_time() -> None:
    plan = place("tp2:3,tp1:1 @4", make_workload())
    estimates = estimate_plan(plan, priced(CLUSTER, a=(5.0, None), b=(None, 1.5)))
    assert estimates.price_per_hour == 6.5
    hours = 1e6 / estimates.tokens_per_s / 3600
    assert estimates.price_per_million_tokens == pytest.approx(6.5 * hours)
    assert estimate_plan(plan, CLUSTER).price_per_million_tokens is None


def test_traffic_between_sites_costs_what_crosses_it() -> None:
    """Two stages on two sites: an activation there and a gradient back for each micro-batch."""
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 1), sites=["west", "east"])
    cluster = priced(cluster, a=(1.0, None), b=(1.0, None))
    cluster = replace(cluster, prices_per_gb={("west", "east"): 0.02, ("east", "west"): 0.05})
    workload = make_workload(tied_embeddings=False)
    costs = CostModel(cluster, workload)
    placement = placement_of(place("tp1:2,tp1:2 @4", workload, cluster), cluster)
    price = price_of(costs, placement, costs.placement(placement))
    assert price is not None
    each = 4 * costs.activation_bytes / 1e9
    assert price.egress_per_step == pytest.approx(each * (0.02 + 0.05))
    # Two replicas: every gradient crosses once in each direction.
    placement = placement_of(place("tp1:4 @2 | tp1:4 @2", workload, cluster), cluster)
    price = price_of(costs, placement, costs.placement(placement))
    assert price is not None
    seconds = costs._exchange.path_seconds(placement, 1024)
    gradients = seconds["a", "b"] * cluster.node_links["a", "b"].bytes_per_s
    assert price.egress_per_step == pytest.approx(gradients / 1e9 * (0.02 + 0.05))


def test_a_plan_says_what_of_its_price_is_traffic_and_whence() -> None:
    """Two pipelines, the first of which crosses between the sites once, the second not at all."""
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2), sites=["west", "east"])
    cluster = priced(cluster, a=(2.0, None), b=(1.0, None))
    cluster = replace(cluster, prices_per_gb={("west", "east"): 0.02, ("east", "west"): 0.02})
    workload = make_workload(tied_embeddings=False, seq_length=2048, max_position_embeddings=2048)
    plan = place("tp1:4 @1 | tp1:2,tp1:2 @3", workload, cluster)
    estimates = estimate_plan(plan, cluster)
    assert estimates.price_per_hour == 3.0
    causes = {part.cause: part for part in estimates.traffic}
    assert set(causes) == {"replica 1, stages 0 to 1", "gradients"}
    message = CostModel(cluster, workload).activation_bytes
    crossing = causes["replica 1, stages 0 to 1"]
    assert crossing.bytes_per_step == 2 * 3 * message and crossing.sites == ("east", "west")
    steps_per_hour = 3600 / estimates.step_time_s
    assert crossing.price_per_hour == pytest.approx(6 * message * 0.02e-9 * steps_per_hour)
    total = sum(part.price_per_hour for part in estimates.traffic)
    assert estimates.traffic_price_per_hour == pytest.approx(total)
    of_tokens = (3.0 + total) / 3600 / estimates.tokens_per_s * 1e6
    assert estimates.price_per_million_tokens == pytest.approx(of_tokens)
    shown = Console(width=120)
    with shown.capture() as printed:
        shown.print(plan_report(replace(plan, estimates=estimates)))
    assert f"3.00 of it for machines, {total:,.2f} for traffic between sites" in printed.get()
    assert f"{crossing.price_per_hour:,.2f}: replica 1, stages 0 to 1, between" in printed.get()


def test_a_budget_keeps_plans_off_dear_traffic() -> None:
    """The fastest plan trains on both sites; the same budget is for one where traffic is dear."""
    cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1), sites=["west", "east"])
    cluster = priced(cluster, a=(1.0, None), b=(1.0, None))
    workload = make_workload(num_layers=8, hidden_size=1024, global_batch_size=16)
    fastest = plan_cluster(cluster, workload)
    assert fastest.estimates is not None and len(fastest.hosts) == 2
    hours = 1000 * fastest.estimates.step_time_s / 3600
    objective = Objective(num_steps=1000, budget=2 * 2.0 * hours)
    for price, num_nodes in ((0.0, 2), (1e3, 1)):
        prices = {("west", "east"): price, ("east", "west"): price}
        plan = plan_cluster(replace(cluster, prices_per_gb=prices), workload, objective=objective)
        assert len(plan.hosts) == num_nodes


def test_a_limit_of_price_is_kept() -> None:
    limits = Limits(memory_reserve_bytes=0, max_price_per_hour=6.0)
    cluster = replace(priced(CLUSTER, a=(5.0, None), b=(None, 1.5)), limits=limits)
    plan = place("tp2:3,tp1:1 @4", make_workload())
    scored = replace(plan, estimates=estimate_plan(plan, cluster))
    (violation,) = price_limit_holds(scored, cluster)
    assert "cost 6.5 an hour; the cluster's limits allow 6" in violation.message
    unpriced = replace(CLUSTER, limits=limits)
    (violation,) = price_limit_holds(
        replace(plan, estimates=estimate_plan(plan, unpriced)), unpriced
    )
    assert "not all machines of the plan have a price" in violation.message
    planned = plan_cluster(cluster, make_workload())
    assert planned.estimates is not None and planned.estimates.price_per_hour == 5.0
    with pytest.raises(UsageError, match="max_price_per_hour needs the price of every machine"):
        plan_cluster(unpriced, make_workload())
