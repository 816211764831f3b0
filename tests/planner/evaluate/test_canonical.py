"""Placements in one form: what stock Megatron runs is arranged in its order of ranks."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.evaluate.canonical import arranged, on_devices_of

GPUS = {"a": (0, 1), "b": (0, 1)}


def replica(*names: str, layers: tuple[int, ...], number: int = 4) -> PlacedReplica:
    """Stages on devices written as `a0`."""
    devices = [(Device(name[0], int(name[1])),) for name in names]
    return PlacedReplica(tuple(map(PlacedStage, devices, layers)), number)


def test_stages_go_to_the_devices_of_another_replica() -> None:
    one = replica("a0", "b0", layers=(4, 2))
    moved = on_devices_of(one, replica("a1", "b1", layers=(3, 3), number=5))
    assert [stage.devices for stage in moved.stages] == [(Device("a", 1),), (Device("b", 1),)]
    assert [stage.num_layers for stage in moved.stages] == [4, 2]
    assert moved.num_micro_batches == 4


def test_replicas_that_do_the_same_are_arranged_as_stock_megatron_ranks_them() -> None:
    """Settings that all stages share stay with them."""
    crossed = replica("a1", "b0", layers=(3, 3)), replica("a0", "b1", layers=(3, 3))
    full = tuple(
        replace(own, stages=tuple(replace(s, recompute="full") for s in own.stages))
        for own in crossed
    )
    placement, order = arranged(Placement(full), GPUS)
    assert order is not None
    assert {s.recompute for r in placement.replicas for s in r.stages} == {"full"}
    assert sorted(placement.devices()) == [Device(n, i) for n in "ab" for i in (0, 1)]


def test_what_only_the_plug_in_runs_stays_as_it_is() -> None:
    crossed = Placement((replica("a1", "b0", layers=(4, 2)), replica("a0", "b1", layers=(3, 3))))
    assert arranged(crossed, GPUS) == (crossed, None)
    counts = replace(crossed.replicas[1], launch_counts=(3, 1))
    assert arranged(Placement((counts,)), GPUS)[1] is None


def test_cards_of_a_machine_that_are_unlike_are_numbered_in_any_order() -> None:
    """A machine of two kinds of cards is two nodes, yet its ranks are one run."""
    gpus = {"box/A": (1, 2), "box/B": (0,)}
    nodes = ("box/A", 1), ("box/B", 0), ("box/A", 2)
    stages = tuple(
        PlacedStage((Device(*node),), n, recompute="full")
        for node, n in zip(nodes, (2, 3, 1), strict=True)
    )
    placement = Placement((PlacedReplica(stages, 4),))
    assert arranged(placement, gpus) == (placement, "tp-dp-pp")
    apart = Placement((replica("a0", "b0", "a1", layers=(2, 3, 1)),))
    assert arranged(apart, GPUS) == (apart, None)
