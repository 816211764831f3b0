"""Layers on devices: what follows from a placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import (
    NO_SETTINGS,
    PlacedReplica,
    PlacedStage,
    Placement,
    own_launch_counts,
)
from tests.cost.builders import make_workload

WORKLOAD = make_workload(num_layers=4)


def stages(*layers: int, node: str = "a") -> tuple[PlacedStage, ...]:
    return tuple(PlacedStage((Device(node, i),), n) for i, n in enumerate(layers))


def test_a_stage_of_context_parallel_groups_by_hand() -> None:
    devices = tuple(Device("a", i) for i in range(4))
    stage = PlacedStage(devices, 3, (2, 1), context_parallel=2)
    assert stage.width == 2
    one, other = stage.groups
    assert (one.devices, other.devices) == (devices[:2], devices[2:])
    assert one.shares == other.shares == (2, 1)
    assert one.context_parallel == 1 and one.num_layers == 3
    alone = PlacedStage(devices, 3)
    assert alone.groups == (alone,) and alone.width == 4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_first_layers_are_where_the_stages_before_end(layers: list[int]) -> None:
    replica = PlacedReplica(stages(*layers), 4)
    assert [sum(layers[:i]) for i in range(len(layers))] == list(replica.first_layers)


@pytest.mark.parametrize(
    ("depth", "number", "counts", "expected"),
    [
        (3, 8, None, (3, 2, 1)),
        (3, 2, None, (2, 2, 1)),
        (3, 8, (6, 4, 1), (6, 4, 1)),
        (3, 5, (6, 4, 1), (5, 4, 1)),
        (1, 8, None, (1,)),
    ],
)
def test_warm_up_depths(
    depth: int, number: int, counts: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    assert PlacedReplica(stages(*[1] * depth), number, counts).num_in_flight == expected
    assert own_launch_counts(depth) == tuple(range(depth, 0, -1))


def test_what_a_placement_has() -> None:
    wide = PlacedStage((Device("b", 0), Device("b", 1)), 4)
    placement = Placement((PlacedReplica(stages(2, 2), 2), PlacedReplica((wide,), 2)))
    assert placement.widths == (1, 2)
    assert not placement.has_shares and not placement.has_context_parallel
    assert [d.name for d in placement.devices()] == ["a:0", "a:1", "b:0", "b:1"]
    shared = Placement((PlacedReplica((replace(wide, shares=(3, 1)),), 2),))
    assert shared.has_shares
    divided = Placement((PlacedReplica((replace(wide, context_parallel=2),), 2),))
    assert divided.has_context_parallel and divided.widths == (1,)


def test_own_settings() -> None:
    (stage,) = stages(4)
    assert stage.own_settings == NO_SETTINGS
    changed = replace(stage, shares=(1,), recompute="full", recompute_num_layers=2)
    assert changed.own_settings == ((1,), "full", 2, None, None)
    assert replace(stage, expert_shares=(1,)).own_settings != NO_SETTINGS
