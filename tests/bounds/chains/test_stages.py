"""Options of stages for the bound: never above what any stage takes, and what they are by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isinf

import numpy as np
import pytest

from megatron_hetero.bounds.chains.kinds import gpu_classes
from megatron_hetero.bounds.chains.stages import PLACES, ChainStageOptions, StageOptionMaker
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.completion.stage_places import StagePlace
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload

MIB = 1 << 20
WORKLOAD = make_workload(num_layers=6, seq_length=1024, global_batch_size=8, vocab_size=1024)


def cluster(memory_mib: int = 1 << 20, *, free: bool = True) -> Cluster:
    memory = memory_mib * MIB
    return make_cluster(
        ("a", replace(FAST, memory_bytes=memory), 2),
        ("b", replace(SLOW, memory_bytes=memory), 2),
        ("c", replace(SLOW, memory_bytes=memory), 2),
        between=Link(3e9, 2e-5),
        limits=FREE if free else AS_GIVEN,
    )


def options_of(
    costs: CostModel, sizes: tuple[int, ...] = (1,), replicas: tuple[int, int] = (1, 1)
) -> tuple[StageOptionMaker, ChainStageOptions]:
    maker = StageOptionMaker(gpu_classes(costs))
    return maker, maker.options([costs.variant(micro_batch_size=s) for s in sizes], replicas)


def kind_of(maker: StageOptionMaker, name: str, width: int) -> int:
    return next(
        k
        for k, (_, c, w) in enumerate(maker.kinds)
        if w == width and name in {node.name for node in c.nodes}
    )


@pytest.mark.parametrize("memory_mib", [150, 250, 350, 480, 1 << 20])
@pytest.mark.parametrize("free", [False, True])
def test_times_are_the_fastest_that_fit(memory_mib: int, free: bool) -> None:
    """As the search finds them, option by option (`StageOptions`): two ways to one answer."""
    costs = CostModel(cluster(memory_mib, free=free), WORKLOAD)
    maker, found = options_of(costs)
    search = StageOptions(costs, 1024)
    for name, width in (("a", 1), ("a", 2), ("b", 1)):
        kind = kind_of(maker, name, width)
        devices = tuple(Device(name, i) for i in range(width))
        for p, (first, last) in enumerate(PLACES):
            for in_flight in range(1, found.max_in_flight + 1):
                expected = [inf] * 7
                of = search.of(StagePlace(devices, None, first, last, in_flight))
                for n, option in enumerate(of, 1):
                    expected[n] = option.time_s
                assert found.time_s[kind, p, in_flight - 1].tolist() == pytest.approx(expected)


def test_like_nodes_are_one_class() -> None:
    maker, found = options_of(CostModel(cluster(), WORKLOAD))
    assert len(maker.classes) == 2
    assert kind_of(maker, "b", 2) == kind_of(maker, "c", 2)
    pairs = sorted(zip(found.gpu_class.tolist(), found.width.tolist(), strict=True))
    assert pairs == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_no_layers_are_no_stage() -> None:
    _, found = options_of(CostModel(cluster(), WORKLOAD))
    assert np.isinf(found.time_s[..., 0]).all()


@pytest.mark.parametrize("memory_mib", [250, 480, 1 << 20])
def test_times_rise_with_layers_and_with_what_is_in_flight(memory_mib: int) -> None:
    _, found = options_of(CostModel(cluster(memory_mib), WORKLOAD))
    times = found.time_s[..., 1:]
    assert (times[..., 1:] >= times[..., :-1]).all()
    assert (found.time_s[:, :, 1:] >= found.time_s[:, :, :-1] * (1 - 1e-12)).all()
    # A first or last stage does what an inner one does, and more.
    for place in (1, 2, 3):
        assert (found.time_s[:, place] >= found.time_s[:, 0]).all()


def test_trips_by_hand() -> None:
    """1 MiB there and back: at 3 GB/s and 20 us between nodes, at 100 GB/s and 3 us inside."""
    maker, found = options_of(CostModel(cluster(), WORKLOAD))
    a, b = kind_of(maker, "a", 1), kind_of(maker, "b", 1)
    size = 1024 * 512 * 2
    assert found.trip_s[a, b] == pytest.approx(2 * (size / 3e9 + 2e-5))
    assert found.trip_s[a, a] == pytest.approx(2 * (size / 100e9 + 3e-6))
    assert found.send_rate_s[a, b] == pytest.approx(size / 3e9)
    # Two groups of two are on b and c; node a has no room for them, and no other node is like it.
    wide = kind_of(maker, "a", 2)
    assert isinf(found.trip_s[wide, wide]) and found.send_rate_s[wide, wide] == 0.0
    assert np.isfinite(found.trip_s[kind_of(maker, "b", 2), kind_of(maker, "b", 2)])


def test_trips_are_the_least_of_all_pairs_of_nodes() -> None:
    links = dict(cluster().node_links)
    for pair in (("a", "c"), ("c", "a")):
        links[pair] = Link(30e9, 1e-6)
    costs = CostModel(replace(cluster(), node_links=links), WORKLOAD)
    maker, found = options_of(costs)
    size = 1024 * 512 * 2
    trip_s = found.trip_s[kind_of(maker, "a", 1), kind_of(maker, "b", 1)]
    assert trip_s == pytest.approx(2 * (size / 30e9 + 1e-6))


def test_of_several_sizes_the_least_of_each() -> None:
    costs = CostModel(cluster(480), WORKLOAD)
    _, both = options_of(costs, (1, 2))
    (_, one), (_, two) = options_of(costs, (1,)), options_of(costs, (2,))
    assert np.array_equal(both.time_s, np.minimum(one.time_s, two.time_s))
    assert np.array_equal(both.rate_s, np.minimum(one.rate_s, two.rate_s))
    assert np.array_equal(both.trip_s, np.minimum(one.trip_s, two.trip_s))
    assert (both.least_size, both.most_size) == (1, 2)
    assert np.array_equal(two.rate_s, two.time_s / 2)


def priced(workload: Workload, index: int, layers: int) -> tuple[float, float]:
    """Seconds and update of a stage of a pipeline of three, as the cost model has them."""
    costs = CostModel(cluster(), workload)
    stages = [PlacedStage((Device("a", 0),), 1) for _ in range(3)]
    stages[index] = PlacedStage((Device("b", 0),), layers)
    cost = costs.stage(PlacedReplica(tuple(stages), 8), index, 1024)
    return cost.times.total_s, cost.update_s


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("layers", [1, 3, 6])
def test_updates_are_those_of_the_cost_model(index: int, layers: int) -> None:
    costs = CostModel(cluster(), WORKLOAD)
    maker, found = options_of(costs)
    place = PLACES.index((index == 0, index == 2))
    time_s, update_s = priced(WORKLOAD, index, layers)
    kind = kind_of(maker, "b", 1)
    assert found.update_s[kind, place, layers] == pytest.approx(update_s)
    assert found.time_s[kind, place, 2 - index, layers] <= time_s * (1 + 1e-12)


def test_more_replicas_update_less_with_the_distributed_optimizer() -> None:
    training = replace(WORKLOAD.training, use_distributed_optimizer=True)
    costs = CostModel(cluster(free=False), replace(WORKLOAD, training=training))
    (_, one), (_, four) = options_of(costs, (1,), (1, 1)), options_of(costs, (1,), (1, 4))
    assert (four.update_s[..., 1:] < one.update_s[..., 1:]).all()
    plain = CostModel(cluster(free=False), WORKLOAD)
    (_, one), (_, four) = options_of(plain, (1,), (1, 1)), options_of(plain, (1,), (1, 4))
    assert np.array_equal(one.update_s, four.update_s)


def test_exchanges_grow_with_layers_and_are_none_for_one_replica() -> None:
    costs = CostModel(cluster(), WORKLOAD)
    _, alone = options_of(costs, (1,), (1, 1))
    _, two = options_of(costs, (1,), (2, 4))
    assert (alone.sync_s == 0).all()
    each_s = np.diff(two.sync_s, axis=-1)
    assert each_s == pytest.approx(np.broadcast_to(each_s[..., :1], each_s.shape))
    assert (two.sync_s >= 0).all()
    training = replace(WORKLOAD.training, overlap_grad_reduce=True)
    hidden = CostModel(cluster(), replace(WORKLOAD, training=training))
    assert (options_of(hidden, (1,), (2, 4))[1].sync_s == 0).all()
