"""Arrangements in which stock Megatron numbers a plan's GPUs, against all permutations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.plan.build import canonical_hosts, plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan, Replica, ReplicaShape, StageShape
from megatron_hetero.plan.stock_ranks import (
    RANK_ORDERS,
    NodeGrid,
    StockArrangement,
    find_stock_arrangement,
    hosts_in_rank_order,
    node_grid,
    places_by_rank,
    rank_orders,
    split_node,
)
from tests.plan.strategies import cluster_of, node, place, workload


def grid(*replicas: str) -> NodeGrid:
    """Width 1: `grid("ab", "ab")` has two replicas with a stage on a and one on b."""
    return tuple(tuple((name,) for name in replica) for replica in replicas)


@st.composite
def grids(draw: st.DrawFn) -> NodeGrid:
    """Up to 4 replicas of up to 3 stages; often arranged as stock does, then shuffled."""
    num_replicas, num_stages = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    width = draw(st.integers(1, 2))
    order = draw(st.sampled_from(RANK_ORDERS))
    places = list(places_by_rank(order, num_replicas, num_stages, width))
    if draw(st.booleans()):
        # Runs of ranks for a few nodes: an arrangement exists.
        names = sorted(draw(st.sampled_from("abcde")) for _ in places)
    else:
        names = [draw(st.sampled_from("abc")) for _ in places]
    name_of = dict(zip(places, names, strict=True))
    replicas = [
        tuple(tuple(name_of[d, p, k] for k in range(width)) for p in range(num_stages))
        for d in range(num_replicas)
    ]
    return tuple(draw(st.permutations(replicas)))


def arrangements(nodes: NodeGrid) -> Iterator[StockArrangement]:
    """Every order of replicas that leaves no node parted."""
    for order in RANK_ORDERS:
        for replicas in permutations(range(len(nodes))):
            if split_node(tuple(nodes[r] for r in replicas), order) is None:
                yield StockArrangement(order, replicas)


@given(grids())
def test_it_finds_an_arrangement_where_there_is_one(nodes: NodeGrid) -> None:
    expected = list(arrangements(nodes))
    found = find_stock_arrangement(nodes)
    if found is None:
        assert expected == []
    else:
        assert found in expected
        assert found.rank_order == expected[0].rank_order  # the default where it can be


@given(grids())
def test_what_is_arranged_already_stays(nodes: NodeGrid) -> None:
    found = find_stock_arrangement(nodes)
    if found is not None:
        arranged = tuple(nodes[r] for r in found.replicas)
        assert find_stock_arrangement(arranged) == StockArrangement(
            found.rank_order, tuple(range(len(nodes)))
        )


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (grid("ab"), StockArrangement("tp-dp-pp", (0,))),
        (grid("aa", "bb"), StockArrangement("tp-pp-dp", (0, 1))),
        (grid("ab", "ab"), StockArrangement("tp-dp-pp", (0, 1))),
        # Replicas that share a node become neighbours.
        (grid("ax", "by", "ax", "by"), StockArrangement("tp-dp-pp", (0, 2, 1, 3))),
        (grid("abc", "dea", "fgd"), StockArrangement("tp-pp-dp", (2, 1, 0))),
        # A slow node at both ends of one pipeline: no order of two nodes does that.
        (grid("abba"), None),
        (grid("ab", "ba", "ab"), None),
    ],
)
def test_small_cases(nodes: NodeGrid, expected: StockArrangement | None) -> None:
    assert find_stock_arrangement(nodes) == expected


@pytest.mark.parametrize("order", RANK_ORDERS)
def test_many_nodes_are_arranged_without_recursion(order: str) -> None:
    """500 nodes of 2 GPUs, a node for each replica, or for one stage of two replicas."""
    names = [f"n{i:03}" for i in range(500)]
    if order == "tp-dp-pp":
        replicas = [((names[d // 2],), (names[250 + d // 2],)) for d in range(500)]
    else:
        replicas = [((names[d],), (names[d],)) for d in range(500)]
    found = find_stock_arrangement(tuple(replicas))
    assert found is not None and found.rank_order == order


def test_the_search_gives_up_where_it_would_take_too_long() -> None:
    # Nodes a0..a19 hold stage 0 of three replicas each, b0..b19 stage 1 of three others: no order.
    replicas = [((f"a{d // 3}",), (f"b{7 * d % 20}",)) for d in range(60)]
    assert find_stock_arrangement(tuple(replicas)) is None


def test_a_parted_node_is_named() -> None:
    assert split_node(grid("abba"), "tp-pp-dp") == ("a", 0, 3)
    assert split_node(grid("ab", "ab"), "tp-pp-dp") == ("a", 0, 2)
    assert split_node(grid("ab", "ab"), "tp-dp-pp") is None


def placed(order: list[str], **node_sizes: int) -> Plan:
    """Two replicas of two stages of width 1 on devices in reading order."""
    cluster = cluster_of(*(node(name, size) for name, size in node_sizes.items()))
    shape = ReplicaShape((StageShape(1, 4), StageShape(1, 4)), 8)
    replicas = place([shape, shape], order)
    return Plan(replicas, workload=workload(), hosts=canonical_hosts(replicas, cluster))


def test_rank_order_decides_between_the_two_mappings() -> None:
    # A node for each replica: ranks follow the pipeline first.
    assert rank_orders(placed(["a:0", "a:1", "b:0", "b:1"], a=2, b=2)) == ("tp-pp-dp",)
    # A node for each stage: ranks follow the replicas first, Megatron's default.
    assert rank_orders(placed(["a:0", "b:0", "a:1", "b:1"], a=2, b=2)) == ("tp-dp-pp",)
    # Neither: the second replica's first stage sits between.
    assert rank_orders(placed(["b:0", "a:0", "c:0", "c:1"], a=1, b=1, c=2)) == ()


@pytest.mark.parametrize(
    "text", ["tp2:4,tp1:4 @16", "tp2:8 @8 | tp1:8 @8", "tp1:8 @1|tp1:4,tp1:4 @1"]
)
def test_unlike_replicas_have_no_order(text: str) -> None:
    assert rank_orders(plan_from_layout(parse_layout(text))) == ()


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_a_bare_layout_follows_the_pipeline_first(width: int, depth: int, replicas: int) -> None:
    replica = f"{','.join([f'tp{width}:2'] * depth)} @4"
    orders = rank_orders(plan_from_layout(parse_layout(" | ".join([replica] * replicas))))
    assert "tp-pp-dp" in orders
    assert ("tp-dp-pp" in orders) == (depth == 1 or replicas == 1)


@given(grids())
def test_hosts_of_an_arrangement_give_every_rank_its_place(nodes: NodeGrid) -> None:
    num_gpus = dict.fromkeys("abcde", 24)
    cluster = cluster_of(*(node(name, size) for name, size in num_gpus.items()))
    free = {name: iter(range(size)) for name, size in num_gpus.items()}
    shape = ReplicaShape(tuple(StageShape(len(cell), 2) for cell in nodes[0]), 8)
    devices = [f"{n}:{next(free[n])}" for replica in nodes for cell in replica for n in cell]
    replicas: tuple[Replica, ...] = place([shape] * len(nodes), devices)
    found = find_stock_arrangement(nodes)
    if found is None:
        return
    replicas = tuple(replicas[r] for r in found.replicas)
    plan = Plan(replicas, hosts=hosts_in_rank_order(replicas, found.rank_order, cluster))
    validate_plan(plan)
    assert node_grid(plan) == tuple(nodes[r] for r in found.replicas)
    assert found.rank_order in rank_orders(plan)


def test_rank_orders_are_those_of_megatrons_generator() -> None:
    from megatron.core.parallel_state import RankGenerator

    width, depth, num_replicas = 2, 3, 2
    for order, name in (("tp-cp-ep-dp-pp", "tp-dp-pp"), ("tp-cp-ep-pp-dp", "tp-pp-dp")):
        pipelines = RankGenerator(
            tp=width, ep=1, dp=num_replicas, pp=depth, cp=1, order=order
        ).get_ranks("pp")
        rank_of = {}
        for column, ranks in enumerate(pipelines):
            for stage, rank in enumerate(ranks):
                rank_of[column // width, stage, column % width] = rank
        devices = [
            f"a:{rank_of[r, s, t]}"
            for r in range(num_replicas)
            for s in range(depth)
            for t in range(width)
        ]
        cluster = cluster_of(node("a", 12))
        shape = ReplicaShape((StageShape(width, 2),) * depth, 8)
        replicas = place([shape] * num_replicas, devices)
        hosts = (replace(canonical_hosts(replicas, cluster)[0], gpu_indices=tuple(range(12))),)
        plan = Plan(replicas, hosts=hosts)
        validate_plan(plan)
        assert rank_orders(plan) == (name,)
