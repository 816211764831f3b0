from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.spec import Cluster, Limits
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import placement_of
from megatron_hetero.cost.price import price_of, price_per_hour
from megatron_hetero.errors import UsageError
from megatron_hetero.plan.check_cluster import price_limit_holds
from megatron_hetero.planner import plan_cluster
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
