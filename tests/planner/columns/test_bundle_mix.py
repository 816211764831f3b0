"""Divisions of a pool's nodes into bundles: beside all divisions of a small pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from megatron_hetero.planner.columns.bundle_mix import PoolBundles
from megatron_hetero.planner.columns.bundles import Mix
from megatron_hetero.planner.columns.pricing import BundleShape, StageTable
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.shapes.kinds import NodeBlock, kinds_of
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

MIB = 1 << 20


def problem_of(memory_bytes: int = 1 << 40) -> Problem:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    nodes = ("a", fast, 2), ("b", fast, 2), ("c", slow, 2), ("d", slow, 2)
    workload = make_workload(num_layers=6, global_batch_size=16, seq_length=1024)
    return make_problem(make_cluster(*nodes), workload)


def pool_of(problem: Problem, counts: tuple[int, ...] = (1, 2), **how: object) -> PoolBundles:
    table = StageTable(problem, kinds_of(problem))
    kinds = range(len(table.kinds))
    return PoolBundles(table, OwnFlags(problem), kinds, counts, 6, **how)  # type: ignore[arg-type]


def test_columns_say_the_same_as_their_bundles() -> None:
    pool = pool_of(problem_of())
    columns = pool.columns()
    assert columns.bundles
    for step_s in (0.5 * columns.fill_s.min(), columns.fill_s.mean(), 10 * columns.fill_s.max()):
        expected = [b.micro_batches(step_s) for b in columns.bundles]
        assert columns.micro_batches(step_s) == pytest.approx(expected)
    for index, one in enumerate(columns.bundles):
        nodes = one.shape.num_nodes()
        assert columns.rows[:, index].tolist() == [nodes.get(k, 0) for k in pool.kinds]
    assert pool.nodes().tolist() == [2.0, 2.0]


def all_mixes(pool: PoolBundles, worths: np.ndarray) -> Iterator[float]:
    """The worth of every division of the nodes into whole bundles, of the worthiest for the nodes
    that each takes."""
    best: dict[tuple[int, ...], float] = {}
    columns = pool.columns()
    for index in range(len(columns.bundles)):
        taken = tuple(int(n) for n in columns.rows[:, index])
        best[taken] = max(best.get(taken, 0.0), float(worths[index]))
    entries = list(best.items())

    def extend(start: int, left: tuple[int, ...], worth: float) -> Iterator[float]:
        yield worth
        for i in range(start, len(entries)):
            taken, more = entries[i]
            if all(n <= have for n, have in zip(taken, left, strict=True)):
                rest = tuple(have - n for n, have in zip(taken, left, strict=True))
                yield from extend(i, rest, worth + more)

    yield from extend(0, tuple(int(n) for n in pool.nodes()), 0.0)


def worth_of(mix: Mix, step_s: float) -> float:
    return sum(count * one.micro_batches(step_s) for one, count in mix)


def nodes_of(mix: Mix) -> dict[int, int]:
    taken: dict[int, int] = {}
    for one, count in mix:
        for kind, nodes in one.shape.num_nodes().items():
            taken[kind] = taken.get(kind, 0) + count * nodes
    return taken


@pytest.mark.parametrize("memory_mib", [150, 250, 1 << 20])
@pytest.mark.parametrize("times", [1.2, 2.0, 8.0])
def test_diving_is_near_the_best_of_all_divisions(memory_mib: int, times: float) -> None:
    pool = pool_of(problem_of(memory_mib * MIB))
    columns = pool.columns()
    if not columns.bundles:
        pytest.skip("nothing fits")
    step_s = times * float(columns.fill_s.min())
    worths = columns.micro_batches(step_s)
    mix = pool.solve(worths)
    assert all(n <= pool.capacity[k] for k, n in nodes_of(mix).items())
    best = max(all_mixes(pool, worths))
    assert worth_of(mix, step_s) <= best * (1 + 1e-9)
    assert worth_of(mix, step_s) >= 0.8 * best
    # In fractions there is never less.
    assert pool.micro_batches(step_s) >= best * (1 - 1e-9)


def test_mixes_of_one_number_of_replicas_have_only_that() -> None:
    pool = pool_of(problem_of())
    step_s = 4 * float(pool.columns().fill_s.max())
    mixed, *single = pool.mixes(step_s)
    assert len(single) == 2
    for mix, count in zip(single, (1, 2), strict=True):
        assert {one.shape.num_replicas for one, _ in mix} == {count}
        assert worth_of(mix, step_s) <= pool.micro_batches(step_s) * (1 + 1e-9)
    assert mixed


def test_longer_steps_do_more() -> None:
    pool = pool_of(problem_of())
    shortest_s = float(pool.columns().fill_s.min())
    done = [pool.micro_batches(f * shortest_s) for f in (0.5, 1.0, 1.5, 2.0, 4.0, 16.0)]
    assert done[0] == 0.0
    assert done == sorted(done) and done[-1] > done[1] > 0


def test_equal_bundles_end_the_sooner_the_earlier_they_come() -> None:
    pool = pool_of(problem_of())
    ranked = pool.uniform_mixes(16)
    ends_s = []
    for ((one, count),) in ranked:
        assert all(count * n <= pool.capacity[k] for k, n in one.shape.num_nodes().items())
        share = -(-16 // (count * one.shape.num_replicas))
        ends_s.append(one.filled.quick_time_s(share))
    assert ends_s == sorted(ends_s)


def test_equal_bundles_of_fewer_kinds_are_the_soonest_of_each_share() -> None:
    pool = pool_of(problem_of())
    ends_s: dict[tuple[int, int, int], float] = {}
    for mix in pool.mixes_of_fewer_kinds(16, inf):
        ((one, count),) = mix
        ((kind, nodes),) = one.shape.num_nodes().items()
        assert count * nodes <= pool.capacity[kind]
        share = -(-16 // (count * one.shape.num_replicas))
        key = kind, one.shape.num_replicas, share
        ends_s[key] = one.filled.quick_time_s(share)
        # A limit of time leaves out what ends then, or later.
        assert mix not in pool.mixes_of_fewer_kinds(16, ends_s[key])
    # All that blocks of one kind and one width can be.
    for pricer in pool.pricers:
        for block, n in product(pricer.blocks, range(1, 3)):
            shape = BundleShape(pricer.num_replicas, (block,) * n)
            copies = pool.capacity[block.kind] // (n * block.num_nodes)
            filled = pool.own_flags.chain(pool._first_chain(shape)) if copies else None
            if filled is not None and len(set(block.widths)) == 1:
                share = -(-16 // (copies * pricer.num_replicas))
                soonest_s = ends_s[block.kind, pricer.num_replicas, share]
                assert soonest_s <= filled.quick_time_s(share)


def test_generation_never_loses_and_is_done_once_a_level() -> None:
    problem = problem_of(200 * MIB)
    slowest = max(pool_of(problem).columns().bundles, key=lambda one: one.filled.period_s)
    pool = pool_of(problem, known=[slowest.shape])
    assert len(pool.columns().bundles) == 1
    step_s = 4 * float(pool.columns().fill_s.max())
    before = pool.micro_batches(step_s)
    assert pool.generate(step_s)
    after = pool.micro_batches(step_s)
    assert after > 1.05 * before
    assert not pool.generate(step_s)
    # It comes near what all bundles without generation do.
    assert after >= 0.9 * pool_of(problem).micro_batches(step_s)


def test_bundles_keep_to_nodes_and_memory() -> None:
    problem = problem_of(120 * MIB)
    pool = pool_of(problem)
    for shape, one in pool.bundles.items():
        if one is not None:
            assert sum(one.filled.layers) == problem.num_layers
            assert all(n <= pool.capacity[k] for k, n in shape.num_nodes().items())
    too_many = BundleShape(1, (NodeBlock(0, 1, (1,)),) * 3)
    assert pool.bundle(too_many) is None


def test_the_best_shapes_do_most_for_their_nodes() -> None:
    pool = pool_of(problem_of())
    step_s = 4 * float(pool.columns().fill_s.max())
    values = pool._first_values(step_s)
    by_count: dict[int, list[float]] = {}
    for shape in pool.best_shapes(step_s):
        one = pool.bundles[shape]
        assert one is not None
        price = sum(values[k] * n for k, n in shape.num_nodes().items())
        by_count.setdefault(shape.num_replicas, []).append(one.micro_batches(step_s) / price)
    assert set(by_count) == {1, 2}
    for worths in by_count.values():
        assert worths == sorted(worths, reverse=True)
