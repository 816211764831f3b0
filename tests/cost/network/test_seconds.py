from __future__ import annotations

import pytest

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.network.collectives import ring_all_gather_s
from megatron_hetero.cost.network.seconds import boundary_time
from tests.cost.builders import BETWEEN, FAST, INSIDE, SLOW, make_cluster

CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 4))


def devices(node: str, *indices: int) -> tuple[Device, ...]:
    return tuple(Device(node, index) for index in indices)


def test_every_byte_crosses_the_card_between_nodes_once() -> None:
    for senders, receivers in ((1, 1), (4, 2), (3, 4)):
        time = boundary_time(
            CLUSTER, devices("a", *range(senders)), devices("b", *range(receivers)), 6e9, True
        )
        assert time.serialisation_s == pytest.approx(6e9 / BETWEEN.bytes_per_s)
        assert time.latency_s == BETWEEN.latency_s


def test_pieces_travel_side_by_side_inside_a_node() -> None:
    time = boundary_time(CLUSTER, devices("a", 0, 1), devices("a", 2, 3), 6e9, True)
    assert time.serialisation_s == pytest.approx(3e9 / INSIDE.bytes_per_s)


def test_without_sequence_parallelism_the_receivers_gather_the_rest() -> None:
    with_sp, without = (
        boundary_time(CLUSTER, devices("a", 0), devices("b", 0, 1), 6e9, sp) for sp in (True, False)
    )
    assert with_sp.serialisation_s == without.serialisation_s
    gather_s = ring_all_gather_s(6e9, 2, INSIDE)
    assert without.latency_s == pytest.approx(with_sp.latency_s + gather_s)
