"""Costs of a placement added up: steps, paths and bytes between nodes, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.step_cost import (
    PlacementCost,
    ReplicaCost,
    StageCost,
    boundary_bytes,
    path_seconds,
)
from megatron_hetero.cost.work.compute import PassTimes


def memory(base: int, each: int, capacity: int) -> StageMemory:
    return StageMemory({"weights": base}, {"weights": each}, capacity)


def stage(num_layers: int = 2, used: int = 80, measured: bool = True) -> StageCost:
    return StageCost(PassTimes(1.0, 2.0), 0.5, 0.1, memory(used, 5, 100), num_layers, measured)


HOP = BoundaryTime(0.25, 0.05, ((0, 0, 1000.0),))


def replica_cost(*costs: StageCost, pipeline_s: float = 10.0, least_s: float = 8.0) -> ReplicaCost:
    hops = (HOP,) * (len(costs) - 1)
    return ReplicaCost(costs, hops, hops, pipeline_s, (), least_s)


def replica(*names: str, number: int = 4) -> PlacedReplica:
    return PlacedReplica(
        tuple(PlacedStage((Device(name[0], int(name[1])),), 2) for name in names), number
    )


def test_what_a_stage_lacks() -> None:
    assert stage(num_layers=2, used=80).missing_bytes == -10
    assert stage(num_layers=4, used=80).missing_bytes == 0
    assert stage(num_layers=5, used=80).missing_bytes == 5


def test_devices_of_a_stage_may_differ_in_memory() -> None:
    alike = stage()
    assert alike.device_memory(0) is alike.device_memory(3) is alike.memory
    small, large = memory(10, 1, 50), memory(20, 1, 90)
    unlike = replace(alike, unlike_memories=(small, large), memory=small)
    assert unlike.device_memory(0) is small and unlike.device_memory(1) is large


def test_a_replica_fits_where_all_of_its_stages_do() -> None:
    assert replica_cost(stage(), stage(num_layers=4)).fits
    assert not replica_cost(stage(), stage(num_layers=5)).fits


def test_a_step_by_hand() -> None:
    """The last replica ends at 12 s, then 3 s of exchange and 1 s of update."""
    replicas = replica_cost(stage()), replica_cost(stage(), pipeline_s=12.0, least_s=9.0)
    cost = PlacementCost(replicas, 2.0, 3.0, 1.0)
    assert cost.pipelines_s == 12.0
    assert cost.step_time_s == 16.0
    assert cost.least_step_s == 13.0
    crowded = PlacementCost(replicas, 20.0, 3.0, 1.0)
    assert (crowded.pipelines_s, crowded.step_time_s, crowded.least_step_s) == (20.0, 24.0, 24.0)


def test_the_tightest_stage_decides_what_is_missing() -> None:
    replicas = replica_cost(stage(num_layers=1)), replica_cost(stage(num_layers=7), stage())
    cost = PlacementCost(replicas, 0.0, 0.0, 0.0)
    assert cost.missing_bytes == 15
    assert cost.measured
    guessed = PlacementCost((replica_cost(stage(), stage(measured=False)),), 0.0, 0.0, 0.0)
    assert not guessed.measured


def test_seconds_of_paths_by_hand() -> None:
    """Four and three micro-batches of 0.25 s each cross from a to b; back as many."""
    placement = Placement(
        (replica("a0", "a1", "b0"), replica("a2", "b1", number=3), replica("b2", "a3", number=1))
    )
    costs = (
        replica_cost(stage(), stage(), stage()),
        replica_cost(stage(), stage()),
        replica_cost(stage(), stage()),
    )
    assert path_seconds(placement, costs) == {
        ("a", "b"): pytest.approx(8 * 0.25),
        ("b", "a"): pytest.approx(8 * 0.25),
    }
    assert path_seconds(Placement((replica("a0", "a1"),)), (replica_cost(stage(), stage()),)) == {}


def test_the_two_directions_of_a_boundary_are_apart() -> None:
    back = BoundaryTime(1.0, 0.0)
    cost = replace(replica_cost(stage(), stage()), backward_hops=(back,))
    found = path_seconds(Placement((replica("a0", "b0"),)), (cost,))
    assert found == {("a", "b"): 1.0, ("b", "a"): 4.0}


def test_bytes_of_boundaries_by_hand() -> None:
    placement = Placement((replica("a0", "a1", "b0"), replica("b1", "c0", number=2)))
    inside = BoundaryTime(0.1, 0.0)
    first = replace(
        replica_cost(stage(), stage(), stage()),
        forward_hops=(inside, HOP),
        backward_hops=(inside, HOP),
    )
    found = list(boundary_bytes(placement, (first, replica_cost(stage(), stage()))))
    assert found == [
        ((0, 1), ("a", "b"), 4000.0),
        ((0, 1), ("b", "a"), 4000.0),
        ((1, 0), ("b", "c"), 2000.0),
        ((1, 0), ("c", "b"), 2000.0),
    ]


def test_a_replica_for_each_cost() -> None:
    with pytest.raises(ValueError, match="shorter"):
        list(boundary_bytes(Placement((replica("a0"), replica("b0"))), (replica_cost(stage()),)))
