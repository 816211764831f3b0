"""Bundles that are made without asking for their worth, and their chains on nodes."""

from __future__ import annotations

import pytest

from megatron_hetero.planner.columns.bundle_shapes import (
    bundle_chains,
    plain_shapes,
    shapes_of_one_kind,
)
from megatron_hetero.planner.columns.pricing import BundleShape
from megatron_hetero.planner.shapes.kinds import NodeBlock
from tests.cost.builders import FAST, SLOW
from tests.planner.columns.pools import capacity, pricer_of, problem_of


def test_plain_shapes_by_hand() -> None:
    """One GPU a stage, or two: all nodes of each kind or half of them, in both orders."""
    table, pricer = pricer_of(problem_of(("a", FAST, 2), ("b", FAST, 2), ("c", SLOW, 2)), 1)
    found = plain_shapes(table, pricer, capacity(table))
    fast, slow = (0, 1) if len(table.kinds[0].nodes) == 2 else (1, 0)
    one, two = (1, 1), (2,)
    expected = set()
    for cut in (one, two):
        of_fast, of_slow = NodeBlock(fast, 1, cut), NodeBlock(slow, 1, cut)
        whole = (of_fast, of_fast, of_slow), (of_slow, of_fast, of_fast)
        expected |= {BundleShape(1, blocks) for blocks in (*whole, (of_fast,))}
    assert set(found) == expected and len(found) == len(expected)


def test_plain_shapes_are_allowed() -> None:
    nodes = [(f"{kind}{i}", gpu, 8) for kind, gpu in (("a", FAST), ("c", SLOW)) for i in range(6)]
    table, pricer = pricer_of(problem_of(*nodes), 1)
    found = plain_shapes(table, pricer, capacity(table))
    assert found
    for shape in found:
        assert 0 < shape.num_stages <= pricer.max_stages
        assert all(n <= capacity(table)[k] for k, n in shape.num_nodes().items())


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
    for shape in plain_shapes(table, pricer, capacity(table)):
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


def test_shapes_of_one_kind_by_hand() -> None:
    """Of five nodes 5, 2 or 1 copies of one, two or five nodes each; of one node one copy."""
    nodes = [(f"a{i}", FAST, 2) for i in range(5)]
    table, pricer = pricer_of(problem_of(*nodes, ("c", SLOW, 2), num_layers=12), 1)
    found = shapes_of_one_kind(table, pricer, capacity(table))
    fast, slow = (0, 1) if len(table.kinds[0].nodes) == 5 else (1, 0)
    expected = {
        BundleShape(1, (NodeBlock(kind, 1, cut),) * n)
        for kind, numbers in ((fast, (1, 2, 5)), (slow, (1,)))
        for n in numbers
        for cut in ((1, 1), (2,))
    }
    assert set(found) == expected and len(found) == len(expected)
