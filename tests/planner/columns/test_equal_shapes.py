"""Bundles for equal copies: beside every sequence of blocks of a small pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from math import inf

import pytest

from megatron_hetero.planner.columns.bundle_mix import PoolBundles
from megatron_hetero.planner.columns.equal_copies import equal_copies, soonest_of_fewer_kinds
from megatron_hetero.planner.columns.equal_shapes import MAX_KINDS, equal_shapes
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape, StageTable
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.shapes.kinds import NodeBlock, cut, kinds_of
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

MIB = 1 << 20


def problem_of(fast_mib: int, slow_mib: int, num_layers: int = 8) -> Problem:
    fast = replace(FAST, memory_bytes=fast_mib * MIB)
    slow = replace(SLOW, memory_bytes=slow_mib * MIB)
    nodes = [(f"a{i}", fast, 2) for i in range(2)] + [(f"b{i}", slow, 2) for i in range(6)]
    workload = make_workload(num_layers=num_layers, global_batch_size=16, seq_length=1024)
    return make_problem(make_cluster(*nodes), workload)


def parts_of(problem: Problem) -> tuple[StageTable, BundlePricer, dict[int, int]]:
    table = StageTable(problem, kinds_of(problem))
    kinds = range(len(table.kinds))
    pricer = BundlePricer(table, kinds, 1, problem.num_layers)
    return table, pricer, {k: len(table.kinds[k].nodes) for k in kinds}


def every_sequence(
    table: StageTable, pricer: BundlePricer, capacity: dict[int, int], most: int
) -> Iterator[BundleShape]:
    """Every sequence of up to so many blocks with one cut for each kind, of both kinds."""
    plain: dict[int, list[NodeBlock]] = {}
    for block in pricer.blocks:
        if block.widths == cut(sum(block.widths), block.widths[0], table.kinds[block.kind].widths):
            plain.setdefault(block.kind, []).append(block)
    for cuts in product(*plain.values()):
        for numbers in product(*(range(1, capacity[k] + 1) for k in plain)):
            if sum(numbers) > most:
                continue
            blocks = [b for b, n in zip(cuts, numbers, strict=True) for _ in range(n)]
            for order in sorted(set(permutations(blocks)), key=repr):
                shape = BundleShape(1, order)
                if shape.num_stages <= pricer.max_stages:
                    yield shape


@pytest.mark.parametrize("memory", [(1 << 20, 1 << 20), (400, 300), (300, 400), (250, 250)])
def test_the_soonest_of_every_sequence_of_blocks(memory: tuple[int, int]) -> None:
    problem = problem_of(*memory)
    table, pricer, capacity = parts_of(problem)
    own_flags = OwnFlags(problem)
    pool = PoolBundles(table, own_flags, list(capacity), [1], problem.num_layers)

    def seconds(shape: BundleShape) -> float:
        bundle = pool.bundle(shape)
        if bundle is None:
            return inf
        return bundle.filled.quick_time_s(equal_copies(pool, shape, 16)[1])

    best_s = min(map(seconds, every_sequence(table, pricer, capacity, 6)))
    found = equal_shapes(table, pricer, capacity)
    assert found and len(set(found)) == len(found)
    for shape in found:
        assert all(n <= capacity[k] for k, n in shape.num_nodes().items())
        assert len(shape.num_nodes()) == 2 and shape.num_stages <= pricer.max_stages
    # The grid of periods is coarse: between two of them an order may be missed by a little.
    assert min(map(seconds, found)) <= 1.03 * best_s
    assert min(map(seconds, pool.bundles)) <= 1.03 * best_s


def test_a_kind_stands_between_blocks_of_another_where_that_holds_most() -> None:
    """The fast GPUs hold too little for the first stage, with its many micro-batches in flight and
    the embedding, and for the last, with the head; the slow ones hold much."""
    problem = problem_of(160, 1 << 20)
    table, pricer, capacity = parts_of(problem)
    fast = next(k for k in capacity if capacity[k] == 2)
    shapes = equal_shapes(table, pricer, capacity)
    orders = [[block.kind == fast for block in shape.blocks] for shape in shapes]
    assert any(not of[0] and not of[-1] and any(of) for of in orders)


def test_of_many_kinds_some_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [replace(FAST, name=f"G{i}", memory_bytes=400 * MIB) for i in range(5)]
    nodes = [(f"n{i}", gpu, 2) for i, gpu in enumerate(kinds) for _ in range(1)]
    workload = make_workload(num_layers=8, global_batch_size=16, seq_length=1024)
    problem = make_problem(make_cluster(*nodes), workload)
    table, pricer, capacity = parts_of(problem)
    found = equal_shapes(table, pricer, capacity)
    assert found
    assert max(len(shape.num_nodes()) for shape in found) <= MAX_KINDS
    assert len({k for shape in found for k in shape.num_nodes()}) <= MAX_KINDS + 1
    # One kind alone is no question of numbers.
    alone = BundlePricer(table, [0], 1, problem.num_layers)
    assert equal_shapes(table, alone, {0: 1}) == []


def test_each_smaller_set_of_kinds_has_bundles_of_its_own() -> None:
    """Many GPUs of a third kind hold more, and make the exchange of gradients longer."""
    third = replace(SLOW, name="third", memory_bytes=SLOW.memory_bytes // 2)
    of = ("a", FAST, 2), ("b", SLOW, 2), ("c", third, 12)
    nodes = [(f"{name}{i}", gpu, 2) for name, gpu, number in of for i in range(number)]
    workload = make_workload(num_layers=8, global_batch_size=16, seq_length=1024)
    problem = make_problem(make_cluster(*nodes), workload)
    table, pricer, capacity = parts_of(problem)
    pool = PoolBundles(table, OwnFlags(problem), list(capacity), [1], problem.num_layers)
    found = soonest_of_fewer_kinds(pool, pricer, 192)
    assert {frozenset(bundle.shape.num_nodes()) for bundle in found} == {
        frozenset(kinds) for number in (1, 2) for kinds in combinations(capacity, number)
    }
