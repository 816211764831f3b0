"""Placements fitted again: splits against all there are, and prices beside the cost model's own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster, Device, Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.refit.refit import (
    Filling,
    Refitter,
    minimax,
    on_devices_of,
    places,
    share_batch,
    with_option,
)
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.naive import parts

WORKLOAD = make_workload(num_layers=6, global_batch_size=8, seq_length=1024)


def two_nodes(memory_bytes: int = 1 << 40, link: Link | None = None, free: bool = True) -> Cluster:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    limits = FREE if free else AS_GIVEN
    return make_cluster(
        ("a", fast, 2), ("b", slow, 2), between=link or Link(3e9, 2e-5), limits=limits
    )


def replica(*names: str, layers: tuple[int, ...], number: int = 8) -> PlacedReplica:
    """Stages on devices written as `a0`."""
    devices = [(Device(name[0], int(name[1])),) for name in names]
    return PlacedReplica(tuple(map(PlacedStage, devices, layers)), number)


@given(
    times_s=st.lists(st.lists(st.floats(0.1, 5), min_size=0, max_size=6), min_size=1, max_size=4),
    num_layers=st.integers(1, 9),
)
def test_minimax_is_the_best_of_all_splits(times_s: list[list[float]], num_layers: int) -> None:
    rising = [[sum(steps[: n + 1]) for n in range(len(steps))] for steps in times_s]
    splits = [
        split
        for split in parts(num_layers, len(rising))
        if all(n <= len(times) for n, times in zip(split, rising, strict=True))
    ]
    found = minimax(num_layers, rising)
    if not splits:
        assert found is None
        return

    def slowest_s(split: tuple[int, ...]) -> float:
        return max(times[n - 1] for n, times in zip(split, rising, strict=True))

    assert found in splits and found is not None
    assert slowest_s(found) == pytest.approx(min(map(slowest_s, splits)))


def test_of_equal_stages_the_later_one_takes_the_layer() -> None:
    """It keeps fewer micro-batches: three layers on two equal stages are 1 and 2."""
    assert minimax(3, [[1.0, 2.0, 3.0]] * 2) == (1, 2)


def filling(fill_s: float, period_s: float, size: int = 1) -> Filling:
    return Filling((), None, size, (), fill_s, period_s)


@given(
    lines=st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=3),
    more=st.integers(0, 8),
    size=st.integers(1, 3),
)
def test_a_batch_of_one_size_is_shared_as_well_as_can_be(
    lines: list[tuple[float, float]], more: int, size: int
) -> None:
    fillings = [filling(fill + period, period, size) for fill, period in lines]
    total = len(lines) + more
    counts = share_batch(size * total, fillings)
    assert counts is not None and sum(counts) == total

    def end_s(split: tuple[int, ...]) -> float:
        return max(f.fill_s + (n - 1) * f.period_s for f, n in zip(fillings, split, strict=True))

    assert end_s(counts) == pytest.approx(min(map(end_s, parts(total, len(lines)))))


def test_unlike_sizes_make_up_the_batch_or_there_is_no_share() -> None:
    fast, slow = filling(1.0, 1.0, 4), filling(1.0, 1.0, 2)
    assert share_batch(6, [fast, slow]) == (1, 1)
    counts = share_batch(16, [fast, slow])
    assert counts is not None
    assert 4 * counts[0] + 2 * counts[1] == 16 and min(counts) >= 1
    assert share_batch(15, [fast, slow]) is None  # no even sizes make 15
    assert share_batch(4, [fast, slow]) is None  # not even one each


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    total=st.integers(1, 16),
)
def test_shares_of_unlike_sizes_add_up_whenever_they_are_given(
    sizes: list[int], total: int
) -> None:
    counts = share_batch(total, [filling(1.0, 1.0, size) for size in sizes])
    possible = any(
        sum(n * size for n, size in zip(split, sizes, strict=True)) == total
        for split in product(range(1, total + 1), repeat=len(sizes))
    )
    if counts is not None:
        assert sum(n * size for n, size in zip(counts, sizes, strict=True)) == total
        assert min(counts) >= 1
    if not possible:
        assert counts is None
    elif 1 in sizes:  # whatever is left goes by ones
        assert counts is not None


def test_stages_go_to_the_devices_of_another_replica() -> None:
    one = replica("a0", "b0", layers=(4, 2))
    other = replica("a1", "b1", layers=(3, 3), number=5)
    moved = on_devices_of(one, other)
    assert [stage.devices for stage in moved.stages] == [(Device("a", 1),), (Device("b", 1),)]
    assert [stage.num_layers for stage in moved.stages] == [4, 2]
    assert moved.num_micro_batches == 8


def test_an_option_is_what_a_stage_then_does() -> None:
    stage = PlacedStage((Device("a", 0),), 4, recompute="selective")
    changed = with_option(stage, 3, StageOption(1.0, 2.0, "full", 2))
    assert (changed.num_layers, changed.recompute, changed.recompute_num_layers) == (3, "full", 2)
    assert changed.devices == stage.devices


def test_a_filling_has_no_more_warm_ups_than_micro_batches() -> None:
    own = replica("a0", "b0", layers=(3, 3))
    made = Filling(own.stages, (6, 1), 2, (1.0, 1.0), 2.0, 1.0)
    assert made.replica(own, 8, 1).launch_counts == (6, 1)
    assert made.replica(own, 4, 1).launch_counts == (4, 1)
    assert made.replica(own, 2, 1).launch_counts is None  # 1F1B's own
    assert made.replica(own, 8, 1).micro_batch_size == 2
    assert made.replica(own, 8, 2).micro_batch_size is None  # the job's


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 8), min_size=3, max_size=3).map(
        lambda c: tuple(sorted(c, reverse=True))
    )
)
def test_places_keep_what_the_cost_model_counts(counts: tuple[int, ...]) -> None:
    """Messages that may still be under way: the same number here as where a placement is priced."""
    costs = CostModel(two_nodes(), WORKLOAD)
    placed = replace(replica("a0", "a1", "b0", layers=(2, 2, 2)), launch_counts=counts)
    for index, of in enumerate(places(placed, counts, True)):
        node = costs.cluster.node_by_name[of.devices[0].node]
        memory = costs.memory(node, 1, of.first, of.last, of.num_in_flight, 1024, of.num_sends_kept)
        assert memory.base == costs.stage_memories(placed, index, 1024)[0].base


def test_sends_kept_by_hand() -> None:
    """With 5, 3 and 1 forwards ahead: each stage keeps its own sends, those of the stage before,
    and one for each forward by which neighbours differ."""
    placed = replica("a0", "a1", "b0", layers=(2, 2, 2))
    kept = [of.num_sends_kept for of in places(placed, (5, 3, 1), True)]
    assert kept == [5 + 2, 3 + 5 + 2 + 2, 0 + 3 + 2]
    assert [of.num_sends_kept for of in places(placed, (3, 2, 1), False)] == [None] * 3


@pytest.mark.parametrize("memory_mib", [150, 230, 300, 4000])
def test_a_filling_is_the_best_split_of_what_fits(memory_mib: int) -> None:
    costs = CostModel(two_nodes(memory_mib << 20), WORKLOAD)
    own = replica("a0", "b0", layers=(3, 3))
    refitter = Refitter(costs, Placement((own,)))
    found = refitter.filling(own, 1, 8)
    options = [refitter.options(1).of(p) for p in places(own, (2, 1), False)]
    splits = [s for s in parts(6, 2) if all(n <= len(of) for n, of in zip(s, options, strict=True))]
    if not splits:
        assert found is None
        return
    assert found is not None
    best_s = min(max(of[n - 1].time_s for n, of in zip(s, options, strict=True)) for s in splits)
    assert max(found.times_s) == pytest.approx(best_s)
    priced = refitter.price(found.replica(own, 8, 1))
    assert priced.fits
    assert [s.times.total_s for s in priced.stages] == pytest.approx(found.times_s)


def test_slow_links_are_hidden_by_more_forwards_and_fast_ones_are_not() -> None:
    own = replica("a0", "b0", layers=(3, 3))
    counts = {}
    for name, link in (("slow", Link(1e9, 20e-3)), ("fast", Link(1e12, 0.0))):
        costs = CostModel(two_nodes(link=link), WORKLOAD)
        found = Refitter(costs, Placement((own,))).filling(own, 1, 8)
        assert found is not None
        counts[name] = found.launch_counts
    assert counts["fast"] is None
    slow = counts["slow"]
    assert slow is not None and slow[0] > 2 and slow[-1] == 1
    assert all(a >= b for a, b in pairwise(slow))


def test_as_given_fillings_do_as_the_jobs_flags_say() -> None:
    costs = CostModel(two_nodes(400 << 20), WORKLOAD)
    own = replica("a0", "b0", layers=(3, 3))
    found = Refitter(costs, Placement((own,)), given=True).filling(own, 1, 8)
    assert found is not None
    assert {s.recompute for s in found.stages} == {None}


def test_replicas_that_are_alike_are_priced_once_and_a_placement_as_ever() -> None:
    costs = CostModel(two_nodes(), WORKLOAD)
    one = replica("a0", "b0", layers=(4, 2), number=4)
    other = replica("a1", "b1", layers=(4, 2), number=4)
    placement = Placement((one, other))
    refitter = Refitter(costs, placement)
    assert refitter.price(one) is refitter.price(other)
    assert refitter.shape(one) == refitter.shape(replica("a1", "b0", layers=(1, 5)))
    assert refitter.key(one) != refitter.key(replica("a1", "b1", layers=(3, 3), number=4))
    assert refitter.cost(placement) == costs.placement(placement)


def test_with_the_distributed_optimizer_more_replicas_leave_more_room() -> None:
    """Their states are divided among all that hold them: 12 of 18 bytes of a parameter."""
    workload = replace(
        WORKLOAD, training=replace(WORKLOAD.training, use_distributed_optimizer=True)
    )
    costs = CostModel(two_nodes(), workload)
    one = replica("a0", layers=(6,), number=8)
    two = Placement(tuple(replica(f"a{i}", layers=(6,), number=4) for i in range(2)))
    peak = [
        Refitter(costs, p).price(p.replicas[0]).stages[0].memory.parts_bytes(6)["optimizer"]
        for p in (Placement((one,)), two)
    ]
    assert peak[1] == pytest.approx(peak[0] / 2, rel=1e-6)
