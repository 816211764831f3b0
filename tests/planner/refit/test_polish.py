"""Small moves of a placement: never for the worse, within memory, until no single move helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster, Device, Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.refit.polish import Polish
from megatron_hetero.planner.refit.refit import Refitter
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=6, global_batch_size=8, seq_length=1024)
NEAR = Link(1e11, 1e-6)


def boxes(between: Link = NEAR, memory_bytes: int = 1 << 40, free: bool = False) -> Cluster:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    limits = FREE if free else AS_GIVEN
    return make_cluster(("a", fast, 2), ("b", slow, 2), between=between, limits=limits)


def replica(*stages: tuple[str, int], number: int) -> PlacedReplica:
    """Stages as (`a0`, layers)."""
    return PlacedReplica(
        tuple(PlacedStage((Device(name[0], int(name[1])),), n) for name, n in stages), number
    )


def polished(costs: CostModel, placement: Placement, work: int = 10**6, **how: bool) -> Placement:
    return Polish(Refitter(costs, placement, **how), placement).run(work)


def slowest_s(costs: CostModel, placement: Placement) -> float:
    return max(r.pipeline_s for r in costs.placement(placement).replicas)


def test_a_layer_goes_from_the_slow_gpu_to_the_fast_one() -> None:
    """Beside all splits of six layers on a fast and a slow GPU."""
    costs = CostModel(boxes(), WORKLOAD)
    start = Placement((replica(("a0", 1), ("b0", 5), number=8),))
    found = polished(costs, start, given=True)
    best_s = min(
        slowest_s(costs, Placement((replica(("a0", n), ("b0", 6 - n), number=8),)))
        for n in range(1, 6)
    )
    assert slowest_s(costs, found) == pytest.approx(best_s, rel=2e-4)
    assert slowest_s(costs, found) < 0.6 * slowest_s(costs, start)


def test_a_micro_batch_goes_from_the_slow_replica_to_the_fast_one() -> None:
    costs = CostModel(boxes(), WORKLOAD)
    start = Placement((replica(("a0", 6), number=1), replica(("b0", 6), number=7)))
    found = polished(costs, start, given=True)
    numbers = [r.num_micro_batches for r in found.replicas]
    assert sum(numbers) == 8
    best_s = min(
        slowest_s(
            costs,
            Placement((replica(("a0", 6), number=n), replica(("b0", 6), number=8 - n))),
        )
        for n in range(1, 8)
    )
    assert slowest_s(costs, found) == pytest.approx(best_s, rel=2e-4)


def test_a_micro_batch_goes_to_the_replica_that_ends_first() -> None:
    """Beside all shares of eight among two fast GPUs and a slow one."""
    costs = CostModel(boxes(), WORKLOAD)

    def shared(*numbers: int) -> Placement:
        names = "b0", "a0", "a1"
        replicas = [replica((name, 6), number=n) for name, n in zip(names, numbers, strict=True)]
        return Placement(tuple(replicas))

    found = polished(costs, shared(3, 4, 1), given=True)
    best_s = min(
        slowest_s(costs, shared(i, j, 8 - i - j)) for i in range(1, 7) for j in range(1, 8 - i)
    )
    assert slowest_s(costs, found) == pytest.approx(best_s, rel=2e-4)


def test_micro_batches_of_another_size_stay() -> None:
    """One of two sequences is not one of one."""
    costs = CostModel(boxes(free=True), WORKLOAD)
    start = Placement(
        (replica(("a0", 6), number=2), replace(replica(("b0", 6), number=3), micro_batch_size=2))
    )
    found = polished(costs, start)
    assert [r.num_micro_batches for r in found.replicas] == [2, 3]


def test_replicas_that_are_alike_move_together() -> None:
    costs = CostModel(boxes(), WORKLOAD)
    start = Placement(
        (replica(("a0", 1), ("b0", 5), number=4), replica(("a1", 1), ("b1", 5), number=4))
    )
    found = polished(costs, start, given=True)
    one, other = found.replicas
    assert [s.num_layers for s in one.stages] == [s.num_layers for s in other.stages]
    assert one.stages[0].num_layers > 1
    assert [s.devices for s in other.stages] == [(Device("a", 1),), (Device("b", 1),)]


def test_no_work_is_no_move() -> None:
    costs = CostModel(boxes(), WORKLOAD)
    start = Placement((replica(("a0", 1), ("b0", 5), number=8),))
    assert polished(costs, start, 0) == start


def test_far_links_are_hidden_unless_all_is_as_given() -> None:
    costs = CostModel(boxes(Link(1e9, 10e-3), free=True), WORKLOAD)
    start = Placement((replica(("a0", 4), ("b0", 2), number=8),))
    free, held = polished(costs, start), polished(costs, start, given=True)
    assert free.replicas[0].launch_counts is not None
    assert held.replicas[0].launch_counts is None
    assert slowest_s(costs, free) < slowest_s(costs, held) <= slowest_s(costs, start)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """One to three replicas on the four GPUs, layers and micro-batches at random."""
    names = draw(st.permutations(["a0", "a1", "b0", "b1"]))
    num_replicas = draw(st.integers(1, 3))
    cuts = sorted(draw(st.sets(st.integers(1, 3), min_size=num_replicas - 1, max_size=2)))
    made, numbers = [], []
    for start, stop in zip([0, *cuts], [*cuts, 4], strict=True):
        own = names[start:stop]
        layers = [1] * len(own)
        for _ in range(6 - len(own)):
            layers[draw(st.integers(0, len(own) - 1))] += 1
        made.append(list(zip(own, layers, strict=True)))
        numbers.append(1)
    for _ in range(8 - len(made)):
        numbers[draw(st.integers(0, len(made) - 1))] += 1
    return Placement(tuple(replica(*r, number=n) for r, n in zip(made, numbers, strict=True)))


@settings(max_examples=40)
@given(placements(), st.sampled_from([NEAR, Link(1e9, 2e-3)]))
def test_moves_never_lose_and_none_is_left_that_gains(placement: Placement, link: Link) -> None:
    costs = CostModel(boxes(link), WORKLOAD)
    found = polished(costs, placement, given=True)
    end_s = slowest_s(costs, found)
    assert end_s <= slowest_s(costs, placement) * (1 + 1e-12)
    assert costs.placement(found).missing_bytes <= 0
    assert sum(r.num_micro_batches for r in found.replicas) == 8
    assert list(found.devices()) == list(placement.devices())
    # No one layer inside the replica that ends last makes it end sooner.
    cost = costs.placement(found)
    last = max(range(len(found.replicas)), key=lambda r: cost.replicas[r].pipeline_s)
    own = found.replicas[last]
    for source, giver in enumerate(own.stages):
        for target, taker in enumerate(own.stages):
            if source == target or giver.num_layers == 1:
                continue
            stages = list(own.stages)
            stages[source] = replace(giver, num_layers=giver.num_layers - 1)
            stages[target] = replace(taker, num_layers=taker.num_layers + 1)
            moved = replace(own, stages=tuple(stages))
            assert costs.replica(moved, 1024).pipeline_s >= end_s * (1 - 1.01e-4)


def test_what_does_not_fit_is_not_moved_to() -> None:
    """Three layers of the fast GPU are all that its memory holds."""
    costs = CostModel(boxes(memory_bytes=300 << 20), WORKLOAD)
    start = Placement((replica(("a0", 3), ("b0", 3), number=8),))
    assert costs.placement(start).missing_bytes <= 0
    found = polished(costs, start, given=True)
    assert costs.placement(found).missing_bytes <= 0
    more = Placement((replica(("a0", 5), ("b0", 1), number=8),))
    assert costs.placement(more).missing_bytes > 0
    assert slowest_s(costs, more) < slowest_s(costs, found)
