"""Prices of stages in a bundle, and the best bundles beside all that can be made of the blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape, StageTable
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.shapes.kinds import NodeBlock, kinds_of
from tests.cost.builders import AS_GIVEN, BETWEEN, FAST, SLOW, make_cluster, make_workload

MIB = 1 << 20


def problem_of(
    memory_bytes: int = 1 << 40,
    between: Link = BETWEEN,
    limits: Limits = AS_GIVEN,
    num_layers: int = 4,
    batch: int = 16,
) -> Problem:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    cluster = make_cluster(
        ("a", fast, 2), ("b", slow, 2), ("c", slow, 2), between=between, limits=limits
    )
    workload = make_workload(num_layers=num_layers, global_batch_size=batch, seq_length=1024)
    return make_problem(cluster, workload)


def table_of(problem: Problem) -> StageTable:
    return StageTable(problem, kinds_of(problem))


def kind_of(table: StageTable, name: str) -> int:
    names = [{node.name for node in kind.nodes} for kind in table.kinds]
    return next(i for i, own in enumerate(names) if name in own)


def test_times_are_those_of_the_price_list() -> None:
    problem = problem_of()
    table = table_of(problem)
    for name, width in product("ab", (1, 2)):
        node = problem.cluster.node_by_name[name]
        pieces = problem.costs.pieces(node, width, table.rows)
        expected = pieces.embedding.total_s, pieces.layer.total_s, pieces.head.total_s
        assert table.times_s(kind_of(table, name), width) == expected


@pytest.mark.parametrize("memory_mib", [60, 150, 250, 1 << 20])
def test_the_layers_that_fit_by_memory(memory_mib: int) -> None:
    """The stage that is third from the end keeps three micro-batches."""
    problem = problem_of(memory_mib * MIB)
    table = table_of(problem)
    node = problem.cluster.node_by_name["b"]
    before = None
    for place in (1, 2, 3, 4):
        memory = problem.costs.memory(node, 1, place == 4, place == 1, place, table.rows)
        found = table.max_layers(kind_of(table, "b"), 1, place == 4, place == 1, place)
        fitting = [n for n in range(5) if memory.peak_bytes(n) <= memory.capacity_bytes]
        assert found == max(fitting, default=0)
        if before is not None and place < 4:
            assert found <= before or place == 2
        before = found


def test_no_more_in_flight_than_micro_batches() -> None:
    problem = problem_of(250 * MIB, batch=1, num_layers=8)
    table = table_of(problem)
    found = {table.max_layers(0, 1, False, False, place) for place in range(2, 8)}
    assert len(found) == 1


def test_hops_by_hand() -> None:
    """An activation of 1 MiB, there and back: at 3 GB/s and 20 us, inside at 100 GB/s and 3 us."""
    problem = problem_of()
    table = table_of(problem)
    a, b = kind_of(table, "a"), kind_of(table, "b")
    size = 1024 * 512 * 2
    assert table.hop_s(a, b) == pytest.approx(2 * (size / 3e9 + 2e-5))
    assert table.hop_s(b, b) == pytest.approx(2 * (size / 3e9 + 2e-5))  # b and c
    assert table.hop_s(a, a) == 0.0  # one node has no path to itself
    assert table.inside_hop_s(a) == pytest.approx(2 * (size / 100e9 + 3e-6))


def test_an_exchange_takes_longer_on_a_slower_link_and_nothing_for_one_replica() -> None:
    fast, slow = problem_of(), problem_of(between=Link(1e8, 2e-5))
    times = [table_of(p).layer_sync_s(0) for p in (fast, slow)]
    assert 0 < times[0] < times[1]
    alone = table_of(problem_of(limits=replace(AS_GIVEN, num_replicas=1)))
    assert alone.pair_sync_s("a", "b") == 0.0 and alone.layer_sync_s(0) == 0.0


def test_periods_go_from_one_layer_to_all() -> None:
    table = table_of(problem_of())
    layer_s = [table.times_s(k, w)[1] for k in range(2) for w in (1, 2)]
    assert table.periods_s[0] == pytest.approx(min(layer_s))
    assert table.periods_s[-1] == pytest.approx(4 * max(layer_s))
    assert (table.periods_s[1:] > table.periods_s[:-1]).all()


@pytest.mark.parametrize("memory_mib", [150, 250, 1 << 20])
@pytest.mark.parametrize("widths", [(1,), (1, 1), (2,)])
@pytest.mark.parametrize("first", [False, True])
def test_held_layers_of_a_block_stage_by_stage(
    memory_mib: int, widths: tuple[int, ...], first: bool
) -> None:
    """As many as the period and the memory of each of its stages allow, none where one holds
    none."""
    problem = problem_of(memory_mib * MIB)
    table = table_of(problem)
    kind = kind_of(table, "b")
    layers, base_s = table.held(NodeBlock(kind, 1, widths), first, 4)
    for behind in range(problem.max_stages()):
        depth = len(widths)
        for period, period_s in enumerate(table.periods_s):
            if behind + depth > problem.max_stages():
                assert layers[behind, period] == 0
                continue
            own = []
            for i, width in enumerate(reversed(widths)):
                place = behind + i + 1
                is_first, last = first and i == depth - 1, place == 1
                embedding_s, layer_s, head_s = table.times_s(kind, width)
                spare_s = period_s - embedding_s * is_first - head_s * last
                by_time = int(spare_s / layer_s + 1e-9) if spare_s > 0 else 0
                room = table.max_layers(kind, width, is_first, last, place)
                own.append(min(by_time, room, 4 // depth))
            expected = min(sum(own), 4) if min(own) >= 1 else 0
            assert layers[behind, period] == expected
    embedding_s, _, head_s = table.times_s(kind, widths[0])
    inside_s = (len(widths) - 1) * table.inside_hop_s(kind)
    assert base_s[1] == pytest.approx(embedding_s * first + inside_s)
    assert base_s[0] - base_s[1] == pytest.approx(head_s)


def test_alike_kinds_share_their_tables() -> None:
    cluster = make_cluster(("a", FAST, 2), ("b", FAST, 2), sites=["here", "there"])
    problem = make_problem(cluster, make_workload(num_layers=4, global_batch_size=16))
    table = table_of(problem)
    assert len(table.kinds) == 2
    one = table.held(NodeBlock(0, 1, (1,)), False, 4)
    assert table.held(NodeBlock(1, 1, (1,)), False, 4) is one


def test_a_shapes_stages_and_nodes() -> None:
    shape = BundleShape(
        2, (NodeBlock(0, 1, (2, 1)), NodeBlock(1, 2, (1,)), NodeBlock(0, 1, (1, 1)))
    )
    assert shape.num_stages == 5
    assert shape.num_nodes() == {0: 2, 1: 2}


def worth_of(
    pricer: BundlePricer, shape: tuple[NodeBlock, ...], step_s: float, values: dict[int, float]
) -> float:
    """Micro-batches that a bundle does beyond those that its nodes are worth, at the best period:
    by the definition, block by block."""
    table, problem = pricer.table, pricer.table.problem
    best = -1e30
    for period, period_s in enumerate(table.periods_s):
        if period_s > step_s:
            continue
        behind, left, time_s, fits = 0, problem.num_layers, 0.0, True
        for number, block in reversed(list(enumerate(shape))):
            layers, base_s = table.held(block, number == 0, pricer.max_node_layers)
            if behind >= problem.max_stages():
                fits = False
                break
            held = min(int(layers[behind, period]), left)
            fits &= layers[behind, period] > 0 and held > 0
            mean_s = sum(table.times_s(block.kind, w)[1] for w in block.widths) / len(block.widths)
            time_s += base_s[behind] + held * mean_s
            if number + 1 < len(shape):
                time_s += table.hop_s(block.kind, shape[number + 1].kind)
            behind += len(block.widths)
            left -= held
        if fits and left == 0:
            prices = sum(values.get(b.kind, 0.0) * b.num_nodes for b in shape)
            done = pricer.num_replicas * (1 + (step_s - time_s) / period_s)
            best = max(best, done - prices)
    return best


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("node_value", [0.0, 1.0, 4.0])
def test_no_bundle_is_worth_more_than_the_first_one(num_replicas: int, node_value: float) -> None:
    problem = problem_of(200 * MIB)
    table = table_of(problem)
    pricer = BundlePricer(table, range(len(table.kinds)), num_replicas, 4)
    values = dict.fromkeys(range(len(table.kinds)), node_value)
    step_s = 40 * table.periods_s[0]
    found = pricer.best(step_s, values)
    assert found
    shapes = [s for n in (1, 2, 3) for s in product(pricer.blocks, repeat=n)]
    most = max(worth_of(pricer, shape, step_s, values) for shape in shapes)
    assert worth_of(pricer, found[0].blocks, step_s, values) >= most * 0.98
    assert all(shape.num_replicas == num_replicas for shape in found)


def test_dear_nodes_and_short_steps_leave_nothing_worth_it() -> None:
    table = table_of(problem_of())
    pricer = BundlePricer(table, range(len(table.kinds)), 1, 4)
    step_s = 40 * table.periods_s[0]
    assert pricer.best(step_s, {})
    assert pricer.best(step_s, dict.fromkeys(range(len(table.kinds)), 1e9)) == []
    assert pricer.best(step_s, {}, bundle_value=1e9) == []
    assert pricer.best(table.periods_s[0] / 2, {}) == []


def test_blocks_have_no_more_stages_than_layers_of_a_node() -> None:
    table = table_of(problem_of())
    wide = BundlePricer(table, range(len(table.kinds)), 1, 4)
    narrow = BundlePricer(table, range(len(table.kinds)), 1, 1)
    assert {b.widths for b in wide.blocks} == {(1, 1), (2,)}
    assert {b.widths for b in narrow.blocks} == {(2,)}
