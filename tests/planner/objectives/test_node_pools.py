"""Machines that can be rented: selections, and what each promises at most."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import micro_batch_sizes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.price import Price
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.objectives.node_pools import (
    NodePool,
    all_selections,
    neighbours,
    node_pools,
    promise,
    restricted,
    some_selections,
    work_of,
)
from megatron_hetero.planner.problem import Problem, make_problem
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.naive import all_placements

WORKLOAD = make_workload(num_layers=3, global_batch_size=4)


def priced(cluster: Cluster, machine: float | None = None, gpu: float | None = None) -> Cluster:
    nodes = tuple(
        replace(node, price_per_hour=machine, gpu_price_per_hour=gpu) for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


BOXES = make_cluster(("a", FAST, 2), ("b", SLOW, 4), ("c", SLOW, 4))


def problem_of(cluster: Cluster = BOXES, name: str = "cheapest") -> Problem:
    objective = Objective(name, 1, 3600.0) if name != "throughput" else Objective()  # type: ignore[arg-type]
    return make_problem(cluster, WORKLOAD, objective=objective)


def pool(num_machines: int, num_gpus: int, unit: int = 1) -> NodePool:
    nodes = make_cluster(*[(f"n{i}", FAST, num_gpus) for i in range(num_machines)]).nodes
    return NodePool(nodes, num_gpus, unit, 1.0, 1.0)


def test_machines_with_a_price_are_taken_whole_and_others_by_the_gpu() -> None:
    whole = node_pools(problem_of(priced(BOXES, machine=2.0)))
    assert sorted((p.unit, p.most) for p in whole) == [(2, 2), (4, 8)]
    single = node_pools(problem_of(priced(BOXES, gpu=0.5)))
    assert sorted((p.unit, p.most) for p in single) == [(1, 2), (1, 8)]


def test_machines_of_two_prices_are_two_pools() -> None:
    cluster = priced(BOXES, gpu=0.5)
    *others, last = cluster.nodes
    dearer = replace(cluster, nodes=(*others, replace(last, gpu_price_per_hour=0.75)))
    found = node_pools(problem_of(dearer))
    assert [[n.name for n in p.nodes] for p in found if len(p.nodes) == 1] != []
    assert sorted(p.most for p in found) == [2, 4, 4]


def test_the_cheapest_work_comes_first() -> None:
    """A slow GPU does a third of the work for as much money."""
    found = node_pools(problem_of(priced(BOXES, gpu=0.5)))
    assert found[0].nodes[0].name == "a"
    nodes = [
        replace(node, gpu_price_per_hour=0.01 if node.name != "a" else 5.0) for node in BOXES.nodes
    ]
    cheap = node_pools(problem_of(replace(BOXES, nodes=tuple(nodes))))
    assert cheap[0].nodes[0].name == "b"


def test_prices_of_selections_by_hand() -> None:
    node = replace(pool(3, 4).nodes[0], price_per_hour=6.0)
    whole = replace(pool(3, 4, 4), nodes=(node,) * 3)
    assert [whole.price_per_hour(n) for n in (0, 1, 4, 5, 12)] == [0.0, 6.0, 6.0, 12.0, 18.0]
    shared = replace(whole, num_islands=2)
    assert shared.price_per_hour(4) == 3.0
    by_gpu = replace(whole, nodes=(replace(node, price_per_hour=None, gpu_price_per_hour=0.5),) * 3)
    assert by_gpu.price_per_hour(5) == 2.5
    assert pool(3, 4).price_per_hour(4) is None


def test_numbers_to_take() -> None:
    assert pool(2, 4).counts() == list(range(9))
    assert pool(2, 4, 4).counts() == [0, 4, 8]
    assert pool(2, 4).counts(0.5) == [0, 1, 2, 4, 7, 8]
    assert pool(8, 4).counts(1.0) == [0, 1, 3, 7, 15, 31, 32]
    assert pool(8, 8, 4).counts(1.0) == [0, 4, 12, 28, 60, 64]
    assert pool(8, 4).counts(100.0) == [0, 1, 32]


def test_all_selections_but_the_empty_one() -> None:
    pools = [pool(1, 2), pool(2, 4, 4)]
    assert all_selections(pools, 100) == [s for s in product(range(3), (0, 4, 8)) if s != (0, 0)]
    assert all_selections(pools, 8) is None
    assert some_selections(pools, 100) == all_selections(pools, 100)


@pytest.mark.parametrize("most", [5, 30, 200])
def test_some_of_very_many_are_few_and_allowed(most: int) -> None:
    pools = [pool(8, 8), pool(4, 8), pool(2, 8)]
    found = some_selections(pools, most)
    assert 0 < len(found) <= most
    assert len(set(found)) == len(found)
    for selection in found:
        assert any(selection)
        assert all(0 <= n <= p.most for n, p in zip(selection, pools, strict=True))


def test_neighbours_by_hand() -> None:
    pools = [pool(1, 2), pool(2, 4, 4)]
    assert set(neighbours(pools, (1, 4))) == {
        (0, 4), (2, 4), (1, 0), (1, 8), (0, 8), (2, 0)
    }  # fmt: skip
    assert set(neighbours(pools, (1, 0))) == {(2, 0), (1, 4), (0, 4)}  # never the empty one


def test_work_is_layers_times_sequences() -> None:
    assert work_of(problem_of(priced(BOXES, gpu=1.0))) == 12


def test_a_promise_by_hand() -> None:
    """Twelve layers for a sequence on GPUs of 1 and of 3 seconds, or the way of one of them."""
    problem = problem_of(priced(BOXES, gpu=0.5))
    pools = [replace(p, layer_gpu_s=s, least_layer_s=s) for p, s in
             zip(node_pools(problem), (1.0, 3.0), strict=True)]  # fmt: skip
    both = promise(problem, pools, (2, 3))
    assert (both.num_gpus, both.price) == (5, Price(2.5))
    assert both.step_s == pytest.approx(12 / (2 / 1.0 + 3 / 3.0))
    slow = promise(problem, pools, (0, 8))
    assert slow.step_s == pytest.approx(9.0)  # three layers of three seconds each, one by one
    unpriced = [replace(p, nodes=pool(4, 4).nodes) for p in pools]
    assert promise(problem, unpriced, (1, 1)).price is None


@settings(max_examples=15)
@given(st.sampled_from(["a", "ab", "bc"]), st.booleans())
def test_no_placement_on_a_selection_beats_its_promise(names: str, free: bool) -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 1), ("c", SLOW, 1))
    if free:
        cluster = replace(cluster, limits=FREE)
    problem = problem_of(cluster, "throughput")
    pools = node_pools(problem)
    chosen = tuple(sum(1 for node in p.nodes if node.name in names) for p in pools)
    promised = promise(problem, pools, chosen)
    part = restricted(problem, pools, chosen)
    costs = CostModel(replace(cluster, nodes=part.nodes), WORKLOAD)
    for placement in all_placements(costs.cluster, WORKLOAD, costs):
        if len(list(placement.devices())) == promised.num_gpus:
            assert costs.placement(placement).step_time_s >= promised.step_s * (1 - 1e-9)


def test_a_promise_is_of_the_recompute_that_takes_least() -> None:
    """It was of full recompute wherever plans may choose: a third too long, and no bound."""
    problem = problem_of(replace(priced(BOXES, gpu=1.0), limits=FREE), "cheapest")
    rows = WORKLOAD.model.vocab_size
    for one in node_pools(problem):
        for size in micro_batch_sizes(problem.costs):
            costs = problem.costs.variant(micro_batch_size=size, recompute="none")
            alone_s = costs.pieces(one.nodes[0], 1, rows).layer.total_s / size
            assert one.layer_gpu_s <= alone_s * (1 + 1e-9)


def test_a_restricted_problem_has_the_first_machines_alone() -> None:
    problem = problem_of(priced(BOXES, gpu=0.5))
    pools = node_pools(problem)
    fast = next(i for i, p in enumerate(pools) if p.nodes[0].name == "a")
    selection = tuple(1 if i == fast else 6 for i in range(2))
    part = restricted(problem, pools, selection)
    assert part.gpus == {"a": (0,), "b": (0, 1, 2, 3), "c": (0, 1)}
    assert part.widths == {"a": (1,), "b": (1, 2, 4), "c": (1, 2)}
    assert [node.name for node in part.nodes] == ["a", "b", "c"]
    only = restricted(problem, pools, tuple(0 if i == fast else 4 for i in range(2)))
    assert list(only.gpus) == ["b"] and only.num_gpus == 4
