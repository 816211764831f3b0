"""Bundles that are made without asking for their worth, and their chains on nodes."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_hetero.planner.columns.bundle_shapes import all_shapes, bundle_chains
from megatron_hetero.planner.columns.kinds import NodeBlock, kinds_of
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape, StageTable
from megatron_hetero.planner.problem import Problem, make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload


def problem_of(*nodes: tuple, num_layers: int = 8) -> Problem:
    workload = make_workload(num_layers=num_layers, global_batch_size=16)
    return make_problem(make_cluster(*nodes), workload)


def pricer_of(problem: Problem, num_replicas: int) -> tuple[StageTable, BundlePricer]:
    table = StageTable(problem, kinds_of(problem))
    return table, BundlePricer(table, range(len(table.kinds)), num_replicas, 8)


def capacity(table: StageTable) -> dict[int, int]:
    return {k: len(kind.nodes) for k, kind in enumerate(table.kinds)}


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_small_clusters_have_every_shape(num_replicas: int) -> None:
    """Of each kind any number of nodes side by side, cut alike, in both orders of the kinds."""
    table, pricer = pricer_of(
        problem_of(("a", FAST, 2), ("b", FAST, 2), ("c", SLOW, 2)), num_replicas
    )
    found = list(all_shapes(table, pricer, capacity(table), 1000))
    assert len(found) == len(set(found))
    menus = {k: [b for b in pricer.blocks if b.kind == k] for k in (0, 1)}
    expected = set()
    for order in ((0, 1), (1, 0)):
        runs = [
            [()] + [(b,) * n for b in menus[k] for n in range(1, capacity(table)[k] + 1)]
            for k in order
        ]
        for one, other in product(*runs):
            shape = BundleShape(num_replicas, (*one, *other))
            if 0 < shape.num_stages <= pricer.max_stages:
                expected.add(shape)
    assert expected <= set(found)
    assert all(
        s.num_nodes()[k] <= n
        for s in found
        for k, n in capacity(table).items()
        if k in s.num_nodes()
    )


@pytest.mark.parametrize("most", [1, 10, 40])
def test_many_shapes_become_fewer_and_stay_allowed(most: int) -> None:
    nodes = [(f"{kind}{i}", gpu, 8) for kind, gpu in (("a", FAST), ("c", SLOW)) for i in range(6)]
    table, pricer = pricer_of(problem_of(*nodes), 1)
    found = list(all_shapes(table, pricer, capacity(table), most))
    more = list(all_shapes(table, pricer, capacity(table), 100_000))
    assert 0 < len(found) < len(more)
    for shape in found:
        assert 0 < shape.num_stages <= pricer.max_stages
        assert all(n <= capacity(table)[k] for k, n in shape.num_nodes().items())


def test_larger_memories_come_first_where_one_order_is_left() -> None:
    nodes = [(f"{kind}{i}", gpu, 8) for kind, gpu in (("a", SLOW), ("c", FAST)) for i in range(6)]
    table, pricer = pricer_of(problem_of(*nodes), 1)
    large = next(k for k, kind in enumerate(table.kinds) if kind.node.gpu_type.name == "FAST")
    found = [s for s in all_shapes(table, pricer, capacity(table), 1) if len(s.num_nodes()) == 2]
    assert found
    assert all(shape.blocks[0].kind == large for shape in found)


def test_a_bundle_on_whole_nodes_by_hand() -> None:
    """Two replicas, each with two GPUs of node a as two stages and one of node c."""
    problem = problem_of(("a", FAST, 4), ("c", SLOW, 2))
    nodes = {0: [problem.nodes[0]], 1: [problem.nodes[1]]}
    shape = BundleShape(2, (NodeBlock(0, 1, (1, 1)), NodeBlock(1, 1, (1,))))
    chains = bundle_chains(shape, nodes, problem)
    assert [[(u.node, u.indices) for u in chain] for chain in chains] == [
        [("a", (0,)), ("a", (1,)), ("c", (0,))],
        [("a", (2,)), ("a", (3,)), ("c", (1,))],
    ]
    assert nodes == {0: [], 1: []}  # they are taken


def test_more_replicas_than_a_node_serves_take_several() -> None:
    problem = problem_of(("a", FAST, 2), ("b", FAST, 2))
    nodes = {0: list(problem.nodes)}
    chains = bundle_chains(BundleShape(4, (NodeBlock(0, 2, (1,)),)), nodes, problem)
    assert [(c[0].node, c[0].indices) for c in chains] == [
        ("a", (0,)), ("a", (1,)), ("b", (0,)), ("b", (1,))
    ]  # fmt: skip


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_no_gpu_is_in_two_stages(num_replicas: int) -> None:
    problem = problem_of(("a", FAST, 4), ("b", FAST, 4), ("c", SLOW, 2), ("d", SLOW, 2))
    table, pricer = pricer_of(problem, num_replicas)
    for shape in all_shapes(table, pricer, capacity(table), 200):
        if any(n > capacity(table)[k] for k, n in shape.num_nodes().items()):
            continue
        nodes = {k: list(kind.nodes) for k, kind in enumerate(table.kinds)}
        chains = bundle_chains(shape, nodes, problem)
        used = [device for chain in chains for unit in chain for device in unit.devices]
        assert len(used) == len(set(used))
        assert len(chains) == num_replicas
        assert {tuple(u.width for u in chain) for chain in chains} == {
            tuple(w for block in shape.blocks for w in block.widths)
        }
