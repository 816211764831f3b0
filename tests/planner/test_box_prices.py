"""A machine with unlike cards is rented whole: every objective in money counts it once, and all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.price import price_per_hour
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.objectives.objective_bound import objective_bound
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.test_objective import brute_force

WORKLOAD = make_workload(num_layers=3, global_batch_size=2)


def rented(box: float, desk: float) -> Cluster:
    """A box of one fast card and two slow ones, and a desk with a slow one, at hourly prices."""
    made = make_cluster(("box/FAST", FAST, 1), ("box/SLOW", SLOW, 2), ("desk", SLOW, 1))
    fast, slow, alone = made.nodes
    nodes = (
        replace(fast, gpu_indices=(0,), price_per_hour=box, host="box"),
        replace(slow, gpu_indices=(1, 2), price_per_hour=box, host="box"),
        replace(alone, price_per_hour=desk),
    )
    return replace(made, nodes=nodes)


def test_any_of_its_cards_costs_the_whole_machine_once() -> None:
    cluster = rented(5.0, 1.0)
    cards = cluster.devices
    assert [card.name for card in cards] == ["box:0", "box:1", "box:2", "desk:0"]
    for used in (cards[:1], cards[1:2], cards[1:3], cards[:3]):
        assert price_per_hour(cluster, used) == 5.0
    assert price_per_hour(cluster, cards) == price_per_hour(cluster, [cards[2], cards[3]]) == 6.0
    by_card = tuple(replace(n, price_per_hour=None, gpu_price_per_hour=2.0) for n in cluster.nodes)
    assert price_per_hour(replace(cluster, nodes=by_card), cards[:2]) == 4.0


@pytest.mark.parametrize(("box", "desk"), [(6.0, 0.2), (6.0, 1.0), (1.0, 1.0), (1.0, 6.0)])
def test_the_cheapest_plan_is_that_of_brute_force(box: float, desk: float) -> None:
    cluster = rented(box, desk)
    least = min(spent for _, spent, _ in brute_force(cluster, WORKLOAD))
    problem = make_problem(cluster, WORKLOAD, objective=Objective("cheapest", 1))
    best = search(problem).best
    assert best is not None
    assert best.standing.value <= least * (1 + 1e-9)
    assert best.has_counts or best.standing.value == pytest.approx(least)
    bound = objective_bound(problem)
    assert bound is not None and bound.value <= best.standing.value * (1 + 1e-9)


@pytest.mark.parametrize(
    ("limit", "uses_box", "uses_desk"), [(1.5, False, True), (5.0, True, False)]
)
def test_a_limit_of_the_hourly_price_allows_whole_machines(
    limit: float, uses_box: bool, uses_desk: bool
) -> None:
    """Under 5 an hour all cards of the box may be used, and none of it under 1.5: a third of its
    price is no price."""
    cluster = rented(5.0, 1.0)
    limits: Limits = replace(cluster.limits, max_price_per_hour=limit)
    problem = make_problem(replace(cluster, limits=limits), WORKLOAD)
    best = search(problem).best
    assert best is not None
    machines = {device.name.partition(":")[0] for device in best.placement.devices()}
    assert ("box" in machines, "desk" in machines) == (uses_box, uses_desk)
    within = [
        step_s
        for step_s, spent, _ in brute_force(cluster, WORKLOAD)
        if spent / step_s * 3600 <= limit * (1 + 1e-12)
    ]
    assert best.step_time_s <= min(within) / (1 - 0.0051)
