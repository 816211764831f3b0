"""Kinds of nodes, and the ways in which a node's GPUs serve replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.shapes.kinds import blocks_of, cut, cuts, kinds_of
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=8, global_batch_size=16)


def problem_of(*nodes: tuple, **changes: object) -> Problem:
    cluster = make_cluster(*nodes)
    return make_problem(replace(cluster, **changes), WORKLOAD)  # type: ignore[arg-type]


def names(problem: Problem) -> list[list[str]]:
    return [[node.name for node in kind.nodes] for kind in kinds_of(problem)]


def test_equal_nodes_are_one_kind() -> None:
    problem = problem_of(("c", FAST, 4), ("a", FAST, 4), ("b", SLOW, 4), ("d", FAST, 2))
    assert sorted(names(problem)) == [["a", "c"], ["b"], ["d"]]
    kinds = {kind.node.name: kind for kind in kinds_of(problem)}
    assert (kinds["a"].num_gpus, kinds["a"].widths) == (4, (1, 2, 4))
    assert (kinds["d"].num_gpus, kinds["d"].widths) == (2, (1, 2))


def test_every_usable_node_is_of_one_kind() -> None:
    problem = problem_of(("a", FAST, 4), ("b", SLOW, 4), ("c", SLOW, 4))
    found = [name for kind in names(problem) for name in kind]
    assert sorted(found) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "change",
    [
        {"site": "elsewhere"},
        {"link": Link(1e9, 1e-3)},
        {"uplink_bytes_per_s": 1e9},
        {"gpu_type": replace(FAST, memory_bytes=1 << 33)},
        {"num_gpus": 3},
    ],
)
def test_whatever_differs_makes_another_kind(change: dict[str, object]) -> None:
    cluster = make_cluster(("a", FAST, 4), ("b", FAST, 4))
    one, other = cluster.nodes
    changed = replace(cluster, nodes=(one, replace(other, **change)))  # type: ignore[arg-type]
    assert len(kinds_of(make_problem(cluster, WORKLOAD))) == 1
    assert len(kinds_of(make_problem(changed, WORKLOAD))) == 2


def test_idle_gpus_and_pins_make_another_kind() -> None:
    nodes = ("a", FAST, 4), ("b", FAST, 4)
    idle = problem_of(*nodes, limits=replace(AS_GIVEN, idle_devices=("b:3",)))
    assert {kind.num_gpus: kind.node.name for kind in kinds_of(idle)} == {4: "a", 3: "b"}
    pinned = problem_of(*nodes, limits=replace(AS_GIVEN, first_stage_nodes=("b",)))
    kinds = {kind.node.name: kind for kind in kinds_of(pinned)}
    assert not kinds["a"].may_start and kinds["b"].may_start
    assert kinds["a"].may_end and kinds["b"].may_end


def test_machines_are_alike_on_other_sites() -> None:
    cluster = make_cluster(("a", FAST, 4), ("b", FAST, 4), sites=["here", "there"])
    one, other = kinds_of(make_problem(cluster, WORKLOAD))
    assert one.machine == other.machine and one.content == other.content
    assert one != other


def partitions(total: int, widest: int) -> set[tuple[int, ...]]:
    """All multisets of positive integers that sum to `total`, the largest first."""
    if not total:
        return {()}
    return {
        (width, *rest)
        for width in range(1, min(total, widest) + 1)
        for rest in partitions(total - width, width)
    }


@given(st.integers(1, 8), st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1))
def test_cuts_are_all_partitions_into_allowed_widths(num_gpus: int, allowed: set[int]) -> None:
    found = cuts(num_gpus, sorted(allowed), 1000)
    expected = {p for p in partitions(num_gpus, num_gpus) if set(p) <= allowed}
    assert len(found) == len(set(found))
    if expected:
        assert set(found) == expected
    else:  # a rest stays idle
        assert all(set(p) <= allowed and sum(p) < num_gpus for p in found)


def test_with_many_cuts_those_of_one_width_remain() -> None:
    assert set(cuts(8, (1, 2, 4, 8), 3)) == {(8,), (4, 4), (2,) * 4, (1,) * 8}
    assert set(cuts(7, (1, 2, 4), 0)) == {(4, 2, 1), (2, 2, 2, 1), (1,) * 7}


@given(st.integers(0, 16), st.integers(1, 8), st.sets(st.integers(1, 8), min_size=1))
def test_a_cut_uses_as_many_gpus_as_it_can(num_gpus: int, width: int, allowed: set[int]) -> None:
    found = cut(num_gpus, width, sorted(allowed))
    assert set(found) <= {w for w in allowed if w <= width}
    left = num_gpus - sum(found)
    assert left >= 0
    assert not any(w <= min(width, left) for w in allowed)
    assert list(found) == sorted(found, reverse=True)


def test_blocks_by_hand() -> None:
    """A node of four GPUs for one, two, four and eight replicas."""
    kinds = kinds_of(problem_of(("a", FAST, 4), ("b", FAST, 4)))
    assert {b.widths for b in blocks_of(kinds, 1)} == {
        (4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)
    }  # fmt: skip
    assert {(b.num_nodes, b.widths) for b in blocks_of(kinds, 2)} == {(1, (2,)), (1, (1, 1))}
    assert [(b.num_nodes, b.widths) for b in blocks_of(kinds, 4)] == [(1, (1,))]
    assert [(b.num_nodes, b.widths) for b in blocks_of(kinds, 8)] == [(2, (1,))]
    assert list(blocks_of(kinds, 9)) == []  # three nodes were needed


@given(st.integers(1, 12))
def test_a_block_has_a_stage_on_each_replicas_own_gpus(num_replicas: int) -> None:
    kinds = kinds_of(problem_of(("a", FAST, 4), ("b", FAST, 4), ("c", SLOW, 3)))
    for block in blocks_of(kinds, num_replicas):
        kind = kinds[block.kind]
        assert num_replicas * sum(block.widths) <= block.num_nodes * kind.num_gpus
        assert 1 <= block.num_nodes <= len(kind.nodes)
        assert set(block.widths) <= set(kind.widths)
