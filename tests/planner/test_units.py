"""Units: the GPUs of a stage, in an order of their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.units import Unit, chains_of, unit_of


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_chains_of_a_placement_are_its_devices(widths: list[int]) -> None:
    start, stages = 0, []
    for width in widths:
        devices = tuple(Device("a", start + i) for i in range(width))
        stages.append(PlacedStage(devices, 1))
        start += width
    placement = Placement((PlacedReplica(tuple(stages), 1),))
    (chain,) = chains_of(placement)
    assert [unit.width for unit in chain] == widths
    assert [device for unit in chain for device in unit.devices] == list(placement.devices())
    assert [unit_of(stage) for stage in stages] == list(chain)


def test_units_sort_by_node_and_place() -> None:
    units = [Unit("b", (0,)), Unit("a", (1,)), Unit("a", (0, 1)), Unit("a", (0,))]
    assert sorted(units) == [Unit("a", (0,)), Unit("a", (0, 1)), Unit("a", (1,)), Unit("b", (0,))]
