"""The compiled loops beside the same loops in Python: equal to the bit, on random pipelines."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from megatron_hetero.bounds.chains import rests
from megatron_hetero.bounds.chains.rests import least_of_rests
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost import pipeline
from megatron_hetero.cost.network.holder_flow import Flow
from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.sync import exchange_clock
from megatron_hetero.cost.sync.exchange_clock import ExchangeStep, last_end_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.kernels import KERNELS
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.columns import bundle_paths
from megatron_hetero.planner.columns.bundle_paths import BlockMenu, BundlePaths, HeldLayers
from megatron_hetero.planner.completion import filled
from megatron_hetero.planner.division import layers
from megatron_hetero.planner.evaluate import tail
from megatron_hetero.planner.shapes.kinds import NodeBlock
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.parts import Crossing, SendMode
from megatron_hetero.schedule.simulator import crowd, relaxed
from megatron_hetero.schedule.simulator.crowd import OneFOneB, crowd_ends_s
from megatron_hetero.schedule.simulator.relaxed import RelaxedRun
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

pytestmark = pytest.mark.skipif(KERNELS is None, reason="this installation has no compiled loops")


def in_python(monkeypatch: pytest.MonkeyPatch, function: Any, *given: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "KERNELS", None)
        patch.setattr(crowd, "KERNELS", None)
        patch.setattr(relaxed, "KERNELS", None)
        patch.setattr(rests, "KERNELS", None)
        patch.setattr(bundle_paths, "KERNELS", None)
        patch.setattr(layers, "KERNELS", None)
        patch.setattr(filled, "KERNELS", None)
        patch.setattr(exchange_clock, "KERNELS", None)
        patch.setattr(tail, "KERNELS", None)
        return function(*given)


def random_counts(rng: Random, num_stages: int, num_micro_batches: int) -> list[int]:
    most, counts = num_micro_batches, list[int]()
    for _ in range(num_stages):
        most = rng.randint(1, most)
        counts.append(most)
    return counts


def seconds(rng: Random) -> float:
    return rng.choice((0.0, 1.0, rng.random(), rng.expovariate(0.5)))


def test_plans_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With replicas that share paths, unlike nodes, and a bound."""
    nodes = ("a", FAST, 3), ("b", FAST, 2), ("c", SLOW, 2)
    cluster = make_cluster(*nodes, between=Link(2e9, 1e-4))
    workload = make_workload(num_layers=6, global_batch_size=12, seq_length=1024)
    compiled = plan_to_data(plan_cluster(cluster, workload))
    assert plan_to_data(in_python(monkeypatch, plan_cluster, cluster, workload)) == compiled


@pytest.mark.parametrize("seed", range(3))
def test_a_pipeline_takes_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    for _ in range(150):
        n, m = rng.randint(2, 9), rng.choice((1, 2, 5, 30, 200))
        stages = [PassTimes(seconds(rng), seconds(rng)) for _ in range(n)]
        hops = [[BoundaryTime(seconds(rng), seconds(rng)) for _ in range(n - 1)] for _ in "ab"]
        counts = random_counts(rng, n, m) if rng.random() < 0.7 else None
        given = stages, *hops, m, counts
        found = pipeline.stage_ends_s(*given)
        assert found == in_python(monkeypatch, pipeline.stage_ends_s, *given)


def random_crowd(rng: Random) -> list[OneFOneB]:
    """Pipelines whose messages take one to three of a few paths, some of them none."""
    names = [f"path {n}" for n in range(rng.randint(1, 5))]

    def crossing() -> Crossing:
        paths = rng.sample(names, rng.randint(0, min(3, len(names))))
        return Crossing(tuple((path, seconds(rng)) for path in paths), seconds(rng))

    made = []
    for _ in range(rng.randint(1, 4)):
        n, m = rng.randint(1, 6), rng.choice((1, 2, 7, 20))
        made.append(
            OneFOneB(
                tuple(random_counts(rng, n, m)),
                m,
                tuple(seconds(rng) for _ in range(n)),
                tuple(seconds(rng) for _ in range(n)),
                tuple(crossing() for _ in range(n - 1)),
                tuple(crossing() for _ in range(n - 1)),
                sends="waited" if rng.random() < 0.5 else "buffered",
            )
        )
    return made


def ends_or_stuck(pipelines: list[OneFOneB]) -> Any:
    """Times, or what the engine says of a crowd that waits for ever."""
    try:
        return crowd_ends_s(pipelines)
    except CheckFailedError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_takes_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    ended = 0
    for _ in range(120):
        pipelines = random_crowd(rng)
        found = ends_or_stuck(pipelines)
        assert found == in_python(monkeypatch, ends_or_stuck, pipelines)
        ended += not isinstance(found, str)
    assert ended > 60


def test_what_no_pipeline_has_is_an_error_of_the_caller() -> None:
    assert KERNELS is not None
    one = [1.0, 1.0]
    hop = [0.0]
    for counts in ([0, 0], [1, 2], [3, 1]):
        with pytest.raises(ValueError, match="launch counts"):
            KERNELS.stage_ends(one, one, hop, hop, hop, hop, 2, counts)
    with pytest.raises(ValueError, match="unlike lengths"):
        KERNELS.stage_ends(one, [1.0], hop, hop, hop, hop, 2, [2, 1])
    with pytest.raises(ValueError, match="a path that there is not"):
        far = ([3], [1.0], 0.0)
        KERNELS.shared_ends([([2, 1], 2, False, one, one, [far], [far])], 1)


@pytest.mark.parametrize(
    ("sends", "chunks"),
    [
        ("waited", 1),
        ("buffered", 1),
        ("buffered", 2),
        ("buffered", 3),
        ("overlapped", 2),
        ("overlapped", 3),
    ],
)
def test_a_schedule_of_many_divisions_takes_the_same_bits(
    sends: SendMode, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(chunks)
    for _ in range(20):
        n = rng.randint(2, 6)
        m = n * rng.randint(1, 5)
        order = one_f_one_b(n, m) if chunks == 1 else interleaved(tuple(range(n)) * chunks, m)
        run = RelaxedRun(order, sends)
        num_divisions = rng.choice((1, 63, 64, 65, 200))

        def row(count: int = num_divisions) -> np.ndarray:
            return np.array([seconds(rng) for _ in range(count)])

        times = [[(row(), row()) for _ in range(chunks)] for _ in range(n)]
        hops = [[(seconds(rng), seconds(rng)) for _ in range(n * chunks - 1)] for _ in "ab"]
        found = run.spans_s(times, *hops)
        beside = in_python(monkeypatch, run.spans_s, times, *hops)
        assert [own.tobytes() for own in found] == [own.tobytes() for own in beside]


def test_steps_that_name_what_there_is_not_are_refused() -> None:
    assert KERNELS is not None
    rows, ends = np.ones((1, 3)), np.zeros((1, 3))
    for step in ((5, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 0, 0, 0), (3, 0, 0, 0)):
        with pytest.raises(ValueError, match="names what there is not"):
            KERNELS.relaxed_ends(array("i", step), 0, rows, [], [], 1, ends)
    KERNELS.relaxed_ends(array("i", (0, 0, 0, 0)), 0, rows, [], [], 1, ends)
    assert ends.tolist() == rows.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_the_least_of_many_ways_takes_the_same_bits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        num_rests, num_ways, num_rows, size = rng.integers([1, 0, 1, 1], [9, 6, 9, 40])
        some = rng.random((num_rests, size)).astype(np.float32)
        some[rng.random(some.shape) < 0.2] = np.inf
        shape = num_ways, num_rows
        add_s, floor_s = (2 * rng.random(shape).astype(np.float32) for _ in "ab")
        floor_s[rng.random(shape) < 0.3] = np.inf
        rows = rng.integers(0, num_rests, shape, dtype=np.int32)
        given = some, rows, add_s, floor_s
        found = least_of_rests(*given)
        assert np.array_equal(found, in_python(monkeypatch, least_of_rests, *given))


def test_a_way_to_no_row_is_refused() -> None:
    one = np.ones((1, 3), np.float32)
    way = np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match="a row that there is not"):
        least_of_rests(one, np.array([[1]], np.int32), way, way)


def random_tables(rng: Random, num_layers: int) -> list[tuple[float, ...]]:
    """Seconds of stages with 1, 2, ... layers; some stages are alike, and some hold few layers."""
    alike = [rng.choice((0.0, 1.0, rng.random())) for _ in range(2)]

    def table() -> tuple[float, ...]:
        end_s, layer_s = rng.choice((0.0, rng.random())), rng.choice((*alike, rng.random()))
        room = num_layers if rng.random() < 0.7 else rng.randint(0, num_layers)
        return tuple(end_s + n * layer_s for n in range(1, room + 1))

    return [table() for _ in range(rng.randint(1, 9))]


@pytest.mark.parametrize("seed", range(3))
def test_layers_are_divided_alike(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    found = 0
    for _ in range(400):
        num_layers = rng.randint(1, 40)
        tables = random_tables(rng, num_layers)
        trips = [seconds(rng) for _ in tables[1:]]
        number = rng.choice((1, 4, 100))
        plain = layers.minimax(num_layers, tables)
        assert plain == in_python(monkeypatch, layers.minimax, num_layers, tables)
        assert plain == layers.minimax(num_layers, [list(table) for table in tables])
        given = num_layers, tables, trips, number
        by_way = filled.balanced(*given)
        assert by_way == in_python(monkeypatch, filled.balanced, *given)
        found += by_way is not None and by_way != plain
    assert found > 20


def test_tables_of_another_kind_are_an_error_of_the_caller() -> None:
    assert KERNELS is not None
    with pytest.raises(TypeError):
        KERNELS.divide_layers(2, [("a", "b"), (1.0, 2.0)], (), 1, 0)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        KERNELS.divide_layers(2, [1.0], (), 1, 0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="unlike lengths"):
        KERNELS.divide_layers(2, [(1.0,), (1.0,)], [1.0, 1.0], 1, 3)


def random_ring(rng: Random, num_paths: int) -> tail._Ring:
    ring = array("d", [2 * rng.random(), rng.choice((1, 2, 8))])
    for kind in sorted(rng.choices(range(3), k=rng.randint(0, 12))):
        way = rng.randrange(num_paths), rng.randint(1, 4), seconds(rng) + 1e-9, seconds(rng)
        ring.extend((kind, *way))
    return ring


@pytest.mark.parametrize("seed", range(3))
def test_the_busiest_path_takes_the_same_bits(seed: int) -> None:
    assert KERNELS is not None
    rng = Random(seed)
    for _ in range(200):
        num_paths = rng.randint(1, 9)
        rings = [random_ring(rng, num_paths) for _ in range(rng.randint(0, 9))]
        loads = [(ring, 1e6 * rng.random()) for ring in rings]
        assert KERNELS.busiest_path(loads, num_paths) == tail._busiest_s(loads)


def test_a_ring_of_another_form_is_an_error_of_the_caller() -> None:
    assert KERNELS is not None
    for numbers in ([1.0, 1.0, 0.0, 3.0, 1.0, 1.0, 0.0], [1.0], [1.0, 1.0, 0.0]):
        with pytest.raises(ValueError, match="a path that there is not"):
            KERNELS.busiest_path([(array("d", numbers), 1.0)], 2)


def random_step(rng: Random, number: int) -> ExchangeStep:
    paths = rng.sample((0, 1, 2, 3, 5, 1_000_003, 7_777_777), rng.randint(0, 6))
    flow = Flow(np.array(paths, np.int64), np.array([seconds(rng) for _ in paths]), seconds(rng))
    first_s = seconds(rng)
    # Rooms that hold all buckets, or none to ask for.
    share = rng.choice((1.0, 0.5, 0.3))
    part = rng.choice((0.0, 0.001, 0.01))
    buffers = {(number, 0): part} if part else {}
    own = ((number, 0),), flow, first_s, first_s + seconds(rng)
    due_s = rng.choice((0.0, 0.0, seconds(rng)))
    return ExchangeStep(*own, bucket_share=share, buffers=buffers, due_s=due_s)


@pytest.mark.parametrize("seed", range(3))
def test_exchanges_take_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    for _ in range(300):
        steps = [random_step(rng, number) for number in range(rng.randint(1, 9))]
        carried = {path: 3 * seconds(rng) for path in rng.sample((1, 2, 5, 9), rng.randint(0, 3))}
        found = last_end_s(steps, carried)
        assert found == in_python(monkeypatch, last_end_s, steps, carried)


@pytest.mark.parametrize("seed", range(3))
def test_exchanges_in_little_room_take_the_same_bits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holders of several exchanges; some have room for two buckets, or for less than one."""
    rng = Random(seed)
    num_short = 0
    for _ in range(300):
        steps = []
        for _ in range(rng.randint(1, 9)):
            held = rng.sample([(r, s) for r in range(3) for s in range(2)], rng.randint(1, 4))
            parts = (0.0, 1 / 128, 0.01, 0.3, 1 / 3, 0.5, 1.0, 2.5)
            buffers = {holder: part for holder in held if (part := rng.choice(parts))}
            one = random_step(rng, 0)
            steps.append(replace(one, holders=tuple(held), buffers=buffers))
        num_short += exchange_clock._lack_room(steps)
        carried = {1: seconds(rng)}
        found = last_end_s(steps, carried)
        assert found == in_python(monkeypatch, last_end_s, steps, carried)
    assert num_short > 200


def test_exchanges_of_another_form_are_an_error_of_the_caller() -> None:
    assert KERNELS is not None
    one, whole = np.ones(1), np.ones(1, np.int64)
    rest = (0.0, 0.0, 0.0, 1.0, 1, 1.0, 0.0)
    for paths, took, order, holders in (
        (whole, np.ones(2), [0], []),
        (np.ones(1, np.int32), one, [0], []),
        (-whole, one, [0], []),
        (whole, one, [1], []),
        (whole, one, [0], [([1], [0.5])]),
        (whole, one, [0], [([-1], [0.5])]),
    ):
        with pytest.raises(ValueError, match="exchange"):
            KERNELS.latest_end([(paths, took, *rest)], order, [], [], holders, 0.0)
    with pytest.raises(IndexError):
        step = whole, one, *rest
        KERNELS.latest_end([step, step], [0, 1], [], [], [([0], [0.5])], 0.0)


def random_menu(rng: Random, num_layers: int, depth: int) -> BlockMenu:
    """Blocks of one to three stages; a few hold the same, so that some pipelines cost the same."""
    widths = [rng.randint(1, 3) for _ in range(rng.randint(1, 12))]
    periods_s = np.sort(np.array([0.1 + 4 * rng.random() for _ in range(5)]))

    def held() -> HeldLayers:
        layers = np.zeros((depth, len(widths), len(periods_s)), np.int16)
        for behind, block, period in np.ndindex(layers.shape):
            most = min(num_layers, int(periods_s[period] * rng.randint(1, 3)))
            if behind + widths[block] <= depth and most >= widths[block]:
                layers[behind, block, period] = most
        base_s = [[seconds(rng) for _ in widths] for _ in range(depth)]
        return HeldLayers(layers, np.array(base_s))

    return BlockMenu(
        tuple(NodeBlock(kind, 1, (1,) * width) for kind, width in enumerate(widths)),
        num_layers,
        periods_s,
        np.array([rng.choice((0.25, 0.5, 0.1 + rng.random())) for _ in widths]),
        held(),
        held(),
        np.array([seconds(rng) for _ in widths]),
        np.array([rng.random() < 0.8 for _ in widths]),
        np.array([rng.random() < 0.8 for _ in widths]),
    )


def found_paths(menu: BlockMenu, prices: Any, step_s: float, least: float) -> Any:
    paths = BundlePaths(menu, prices, step_s, least)
    periods = range(len(paths.periods_s))
    return paths.end_cost.tolist(), [paths.blocks(period) for period in periods]


@pytest.mark.parametrize("seed", range(3))
def test_sequences_of_blocks_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    ended = 0
    for _ in range(100):
        menu = random_menu(rng, rng.randint(1, 14), rng.randint(1, 9))
        prices = np.array([rng.choice((0.0, 1.0, 5 * rng.random())) for _ in menu.blocks])
        given = menu, prices, rng.choice((1.5, 4.0, 50.0)), rng.choice((-np.inf, 0.0, 2.0))
        found = found_paths(*given)
        assert found == in_python(monkeypatch, found_paths, *given)
        ended += any(found[1])
    assert ended > 40


def test_a_menu_of_other_sizes_is_an_error_of_the_caller() -> None:
    menu = random_menu(Random(0), 6, 4)
    with pytest.raises(ValueError, match="arrays of blocks"):
        BundlePaths(menu, np.array([0.0]), 4.0)
    deep = replace(menu, held=HeldLayers(np.full_like(menu.held.layers, 6), menu.held.base_s))
    with pytest.raises(ValueError, match="arrays of blocks"):
        BundlePaths(deep, np.zeros(len(menu.blocks)), 4.0)
