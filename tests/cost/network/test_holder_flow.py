"""Loads of an exchange on its paths, by hand and as what goes over each cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Incast, Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.holder_flow import HolderFlow, HolderFlows
from megatron_hetero.cost.network.ring import ring_order
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.schedule.exchange.taken import taken_directly
from megatron_hetero.schedule.network import group_name
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

BETWEEN, INSIDE = Link(1e9, 1e-3), Link(100e9, 1e-6)
CLUSTER = make_cluster(
    ("a", FAST, 4), ("b", FAST, 4), ("c", SLOW, 4), between=BETWEEN, inside=INSIDE
)
MODEL = make_workload().model


def stage(name: str, *indices: int) -> PlacedStage:
    return PlacedStage(tuple(Device(name, i) for i in indices), 4)


def loads(found: HolderFlow, cluster: Cluster = CLUSTER) -> dict[tuple[str, str], float]:
    """Seconds for each byte of the paths between nodes."""
    names = [node.name for node in cluster.nodes]
    paths = {}
    for path, seconds in zip(found.paths.tolist(), found.s_per_byte.tolist(), strict=True):
        if 0 <= path < len(names) ** 2:
            paths[names[path // len(names)], names[path % len(names)]] = seconds
    return paths


def flows(cluster: Cluster = CLUSTER) -> HolderFlows:
    return HolderFlows(cluster, MODEL)


def test_numbers_of_paths() -> None:
    own = flows()
    assert own.node_number == {"a": 0, "b": 1, "c": 2}
    assert own.first_port == 9
    assert own.first_line == 9 + 2 * 12
    assert own.numbered({("a", "b"): 5.0, ("c", "a"): 7.0}, {}) == {1: 5.0, 6: 7.0}


def test_a_ring_of_two_by_hand() -> None:
    """Twice half of the buffer crosses each way."""
    found = flows().around([stage("a", 0), stage("b", 0)], 2)
    assert loads(found) == {
        ("a", "b"): pytest.approx(1e-9), ("b", "a"): pytest.approx(1e-9)
    }  # fmt: skip
    assert found.latency_s == pytest.approx(2 * 1e-3)
    assert len(found.ports) == 0
    once = flows().around([stage("a", 0), stage("b", 0)], 1)
    assert loads(once)["a", "b"] == pytest.approx(0.5e-9)


def test_a_ring_inside_a_node_loads_ports() -> None:
    found = flows().around([stage("a", 0), stage("a", 1)], 2)
    assert loads(found) == {}
    assert found.places.tolist() == [0, 1, 1, 0] and found.directions.tolist() == [0, 0, 1, 1]
    assert found.s_per_byte == pytest.approx([1 / 100e9] * 4)


def test_groups_side_by_side_send_their_parts_inside() -> None:
    """Of a group of two each sends its half over a port of its own, and both over one NIC."""
    inside = flows().around([stage("a", 0, 1), stage("a", 2, 3)], 2)
    assert inside.s_per_byte == pytest.approx([0.5 / 100e9] * 4)
    between = flows().around([stage("a", 0, 1), stage("b", 0, 1)], 2)
    assert loads(between)["a", "b"] == pytest.approx(1e-9)


def test_everyone_to_everyone_by_hand() -> None:
    """Of three holders, one on each node: a third of the buffer on each path."""
    found = flows().to_owners([stage("a", 0), stage("b", 0), stage("c", 0)])
    paths = loads(found)
    assert len(paths) == 6
    assert list(paths.values()) == pytest.approx([1 / 3 / 1e9] * 6)
    assert found.latency_s == pytest.approx(1e-3)
    assert found.adding_s_per_byte == 0.0


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(CLUSTER.devices), min_size=2, max_size=8, unique=True),
    st.lists(st.sampled_from([None, 1, 3]), min_size=8, max_size=8),
)
def test_what_crosses_paths_is_what_their_holders_send(
    devices: list[Device], shares: list[int | None]
) -> None:
    """Of every holder, to every other one, the part of the buffer that the other one owns."""
    stages = [
        PlacedStage((device,), 4, optimizer_share=share)
        for device, share in zip(sorted(devices), shares, strict=False)
    ]
    found = flows().to_owners(stages)
    taken, _, _ = taken_directly(
        CLUSTER, [s.devices[0] for s in stages], [s.optimizer_share or 1 for s in stages], 1.0
    )
    expected = dict(taken)
    for (here, there), seconds in loads(found).items():
        assert seconds == pytest.approx(expected.pop(f"{here} -> {there}"))
    ways = found.places.tolist(), found.directions.tolist()
    for place, way, seconds in zip(*ways, found.s_per_byte[found.ports].tolist(), strict=True):
        port = f"{group_name(stages[place].devices)} {('out', 'in')[way]}"
        assert seconds == pytest.approx(expected.pop(port))
    assert not expected


@settings(max_examples=40)
@given(st.lists(st.sampled_from(CLUSTER.devices), min_size=2, max_size=8, unique=True))
def test_a_ring_crosses_each_node_once_each_way(devices: list[Device]) -> None:
    stages = [PlacedStage((device,), 4) for device in devices]
    found = loads(flows().around(ring_order(CLUSTER, stages), 2))
    nodes = {device.node for device in devices}
    if len(nodes) == 1:
        assert found == {}
        return
    share = 2 * (len(devices) - 1) / len(devices) / 1e9
    assert sorted(here for here, _ in found) == sorted(nodes)
    assert sorted(there for _, there in found) == sorted(nodes)
    assert list(found.values()) == pytest.approx([share] * len(nodes))


def test_a_flow_has_the_holders_own_ports_and_bytes() -> None:
    own = flows()
    found = own.around([stage("a", 0), stage("a", 1)], 2)
    flow = found.of(np.array([100, 200]), 1e9, 1e6)
    assert flow.paths.tolist() == [100, 200, 201, 101]
    assert flow.seconds == pytest.approx(found.s_per_byte * 1e9)
    assert flow.latency_s == found.latency_s
    again = found.of(np.array([300, 400]), 1.0, 1.0)
    assert again.paths.tolist() == [300, 400, 401, 301]  # the first was not changed


def with_links(**changes: object) -> Cluster:
    link = replace(BETWEEN, **changes)  # type: ignore[arg-type]
    return replace(CLUSTER, node_links=dict.fromkeys(CLUSTER.node_links, link))


def test_owners_wait_for_what_they_add() -> None:
    """Two pieces and the own one, read and written: 4 accesses of a third of a bucket."""
    cluster = with_links(reduce_bytes_per_s=1e9)
    found = flows(cluster).to_owners([stage("a", 0), stage("b", 0), stage("c", 0)])
    assert found.adding_s_per_byte == pytest.approx(4 / 3 / 1e9)
    flow = found.of(np.array([0, 0, 0]), 1.0, 3e9)
    assert flow.latency_s == pytest.approx(1e-3 + 4.0)


def test_two_senders_to_one_receiver_take_twice_as_long_where_links_say_so() -> None:
    cluster = with_links(incast=Incast(1, 1.0))
    stages = [stage("a", 0), stage("b", 0), stage("c", 0)]
    plain, slowed = (flows(c).to_owners(stages) for c in (CLUSTER, cluster))
    assert slowed.s_per_byte == pytest.approx(2 * plain.s_per_byte)


def test_uplinks_are_lines_that_all_paths_of_a_node_share() -> None:
    nodes = tuple(replace(node, uplink_bytes_per_s=1e9) for node in CLUSTER.nodes)
    shared = flows(replace(CLUSTER, nodes=nodes))
    found = shared.to_owners([stage("a", 0), stage("b", 0), stage("c", 0)])
    lines = found.s_per_byte[found.paths >= shared.first_line]
    # Out of and into each node: two thirds of the buffer.
    assert lines == pytest.approx([2 / 3 / 1e9] * 6)


def test_groups_of_machines_send_the_buffer_once_each_way() -> None:
    stages = [stage("a", 0), stage("a", 1), stage("b", 0), stage("b", 1)]
    found = flows().by_groups(stages, [["a"], ["b"]], "all_reduce")
    assert found is not None
    assert loads(found) == {
        ("a", "b"): pytest.approx(1e-9, rel=1e-4), ("b", "a"): pytest.approx(1e-9, rel=1e-4)
    }  # fmt: skip
    assert set(found.places.tolist()) == {0, 1, 2, 3}
    assert flows().by_groups(stages, [["a", "b"]], "all_reduce") is None
