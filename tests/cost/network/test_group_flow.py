"""An exchange by groups of machines as loads: by hand on two machines of two GPUs."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Incast, Link, mapped_links
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.group_flow import GroupTransfers, group_transfers
from megatron_hetero.exchange.plan import Purpose
from tests.cost.builders import FAST, SLOW, make_cluster

BETWEEN = Link(1e9, 1e-3)
INSIDE = Link(100e9, 1e-6)
CLUSTER = make_cluster(
    ("a", FAST, 2), ("b", FAST, 2), ("c", SLOW, 2), between=BETWEEN, inside=INSIDE
)
FOUR = [Device("a", 0), Device("a", 1), Device("b", 0), Device("b", 1)]
PURPOSES: tuple[Purpose, ...] = ("all_reduce", "reduce_scatter", "all_gather")


def between(found: GroupTransfers, devices: list[Device]) -> dict[tuple[str, str], float]:
    """The part of the buffer that crosses each pair of nodes."""
    parts: dict[tuple[str, str], float] = {}
    for t in found.transfers:
        pair = devices[t.sender].node, devices[t.receiver].node
        parts[pair] = parts.get(pair, 0.0) + t.part
    return {pair: part for pair, part in parts.items() if pair[0] != pair[1]}


def exchange(
    devices: list[Device],
    groups: list[list[str]],
    purpose: Purpose = "all_reduce",
    cluster: Cluster = CLUSTER,
) -> GroupTransfers:
    found = group_transfers(cluster, devices, groups, purpose)
    assert found is not None
    return found


def test_all_in_one_group_is_no_exchange_by_groups() -> None:
    assert group_transfers(CLUSTER, FOUR, [["a", "b"]], "all_reduce") is None
    assert group_transfers(CLUSTER, FOUR[:2], [["a"], ["b"]], "all_reduce") is None


def test_two_groups_send_the_buffer_once_each_way() -> None:
    """Each group reduces inside, halves cross both ways, and what is summed comes back: whatever
    the number of GPUs, no more than the buffer leaves a machine."""
    found = exchange(FOUR, [["a"], ["b"]])
    parts = between(found, FOUR)
    assert parts[("a", "b")] == pytest.approx(1.0, rel=1e-4)
    assert parts[("b", "a")] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("purpose", ["reduce_scatter", "all_gather"])
def test_half_of_an_all_reduce_sends_half_as_much(purpose: Purpose) -> None:
    parts = between(exchange(FOUR, [["a"], ["b"]], purpose), FOUR)
    assert sum(parts.values()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_seconds_are_those_of_the_links(purpose: Purpose) -> None:
    for t in exchange(FOUR, [["a"], ["b"]], purpose).transfers:
        is_inside = FOUR[t.sender].node == FOUR[t.receiver].node
        speed = (INSIDE if is_inside else BETWEEN).bytes_per_s
        assert t.s_per_byte == pytest.approx(t.part / speed)


def test_a_receive_only_sends_what_it_has() -> None:
    """No holder sends more than all of the buffer to one other, and none to itself."""
    for purpose in PURPOSES:
        for t in exchange(FOUR, [["a"], ["b"]], purpose).transfers:
            assert t.sender != t.receiver
            assert 0 < t.part <= 2 + 1e-6


def test_latency_is_that_of_each_rounds_slowest_message() -> None:
    found = exchange(FOUR, [["a"], ["b"]])
    assert found.latency_s >= 2 * 1e-3 * (1 - 1e-9)
    slow = exchange(
        FOUR,
        [["a"], ["b"]],
        cluster=replace(
            CLUSTER,
            node_links=mapped_links(CLUSTER.node_links, lambda link: replace(link, latency_s=2e-3)),
        ),
    )
    crossing_rounds = (slow.latency_s - found.latency_s) / 1e-3
    assert crossing_rounds == pytest.approx(round(crossing_rounds))
    assert crossing_rounds >= 1


def test_adding_costs_nothing_where_links_do_not_say() -> None:
    assert exchange(FOUR, [["a"], ["b"]]).adding_s_per_byte == 0.0


def test_adding_by_hand() -> None:
    """Two GPUs on two machines: each adds one half of the buffer, three accesses a byte."""
    changed = replace(
        CLUSTER,
        node_links=mapped_links(
            CLUSTER.node_links, lambda link: replace(link, reduce_bytes_per_s=1e9)
        ),
    )
    devices = [Device("a", 0), Device("b", 0)]
    found = exchange(devices, [["a"], ["b"]], cluster=changed)
    assert found.adding_s_per_byte == pytest.approx(1.5 / 1e9)
    gathered = exchange(devices, [["a"], ["b"]], "all_gather", changed)
    assert gathered.adding_s_per_byte == 0.0  # a gather adds nothing


def test_many_senders_to_one_receiver_are_slower_where_links_say_so() -> None:
    incast = replace(
        CLUSTER,
        node_links=mapped_links(
            CLUSTER.node_links, lambda link: replace(link, incast=Incast(1, 1.0))
        ),
    )
    devices = [Device("a", 0), Device("b", 0), Device("c", 0)]
    groups = [["a"], ["b"], ["c"]]
    plain = exchange(devices, groups)
    slowed = exchange(devices, groups, cluster=incast)
    plain_s = sum(t.s_per_byte for t in plain.transfers)
    assert sum(t.s_per_byte for t in slowed.transfers) >= plain_s
    assert [t.part for t in slowed.transfers] == [t.part for t in plain.transfers]


def test_no_node_sends_faster_than_its_fastest_link() -> None:
    """To two others at once: the paths together take as long as the NIC takes for all."""
    devices = [Device("a", 0), Device("b", 0), Device("c", 0)]
    found = exchange(devices, [["a"], ["b"], ["c"]])
    sent: dict[str, float] = {}
    longest: dict[str, float] = {}
    for t in found.transfers:
        node = devices[t.sender].node
        sent[node] = sent.get(node, 0.0) + t.part
        longest[node] = max(longest.get(node, 0.0), t.s_per_byte)
    for node, part in sent.items():
        assert longest[node] >= part / BETWEEN.bytes_per_s * (1 - 1e-6)


@given(
    st.lists(st.sampled_from(CLUSTER.devices), min_size=2, max_size=6, unique=True),
    st.sampled_from(PURPOSES),
)
def test_every_group_gives_and_gets(devices: list[Device], purpose: Purpose) -> None:
    groups = [["a"], ["b", "c"]]
    found = group_transfers(CLUSTER, devices, groups, purpose)
    nodes = {device.node for device in devices}
    if "a" not in nodes or nodes == {"a"}:
        assert found is None
        return
    assert found is not None
    parts = between(found, devices)
    out = sum(part for (here, _), part in parts.items() if here == "a")
    back = sum(part for (_, there), part in parts.items() if there == "a")
    assert out > 0 and back > 0
    assert max(out, back) <= 2.0 + 1e-6
    assert all(t.s_per_byte > 0 and t.s_per_byte < inf for t in found.transfers)


def test_fast_uplinks_own_more() -> None:
    """Of three machines of 3, 2 and 1 the last owns nothing: it sends all once, and gets all."""
    devices = [Device("a", 0), Device("b", 0), Device("c", 0)]
    found = group_transfers(
        CLUSTER, devices, [["a"], ["b"], ["c"]], "all_reduce", uplinks=[[3], [2], [1]]
    )
    assert found is not None
    parts = between(found, devices)
    sent = {a: sum(part for (here, _), part in parts.items() if here == a) for a in "abc"}
    assert sent == pytest.approx({"a": 1.8, "b": 1.2, "c": 1.0}, rel=1e-3)


def test_what_a_holder_owns_decides_what_it_gathers() -> None:
    """Owners of 3 and 1 quarters of the buffer: the other side gets as much."""
    devices = [Device("a", 0), Device("b", 0)]
    found = group_transfers(CLUSTER, devices, [["a"], ["b"]], "all_gather", [3, 1])
    assert found is not None
    parts = between(found, devices)
    assert parts[("a", "b")] == pytest.approx(0.75, rel=1e-4)
    assert parts[("b", "a")] == pytest.approx(0.25, rel=1e-4)
