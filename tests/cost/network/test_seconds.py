from __future__ import annotations

import pytest

from megatron_hetero.cluster.spec import Device, Link
from megatron_hetero.cost.network.seconds import (
    boundary_time,
    ring_all_gather_s,
    ring_all_reduce_s,
    tensor_parallel_times,
    worst_link,
)
from tests.cost.builders import BETWEEN, FAST, INSIDE, SLOW, make_cluster

LINK = Link(1e9, 1e-3)
CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 4))


def devices(node: str, *indices: int) -> tuple[Device, ...]:
    return tuple(Device(node, index) for index in indices)


def test_ring_all_reduce_is_two_n_minus_one_rounds() -> None:
    assert ring_all_reduce_s(4e9, 4, LINK) == pytest.approx(6 * (1e-3 + 1))
    assert ring_all_gather_s(4e9, 4, LINK) == pytest.approx(3 * (1e-3 + 1))
    assert ring_all_reduce_s(4e9, 1, LINK) == 0


def test_rings_that_crowd_a_bus_have_the_bandwidth_of_their_size() -> None:
    link = Link(8e9, 0.0, group_bytes_per_s=((4, 2e9), (8, 1e9)))
    plain = {n: ring_all_reduce_s(8e9, n, Link(8e9, 0.0)) for n in (2, 3, 4, 6, 8)}
    found = {n: ring_all_reduce_s(8e9, n, link) / plain[n] for n in plain}
    assert found == {2: 1, 3: 1, 4: 4, 6: 4, 8: 8}
    both = worst_link([link, Link(4e9, 1e-6)])
    assert [both.ring_bytes_per_s(n) for n in (2, 4, 8)] == [4e9, 2e9, 1e9]


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


def test_tensor_parallel_collectives_of_a_layer() -> None:
    reduce_s = ring_all_reduce_s(1e9, 4, LINK)
    plain = tensor_parallel_times(1e9, 4, LINK, False, 1000)
    assert (plain.layer_forward_s, plain.layer_backward_s) == (2 * reduce_s, 2 * reduce_s)
    sequence = tensor_parallel_times(1e9, 4, LINK, True, 1000)
    assert sequence.layer_forward_s == 2 * reduce_s
    assert sequence.layer_backward_s == pytest.approx(3 * reduce_s)
    alone = tensor_parallel_times(1e9, 1, None, False, 1000)
    assert alone.layer_forward_s == alone.head_backward_s == 0
