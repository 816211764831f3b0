from __future__ import annotations

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.gradients import GradientExchangePrices, StageEnd
from megatron_hetero.cost.sync.groups import sync_groups
from tests.cost.builders import BETWEEN, FAST, INSIDE, SLOW, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 4))


def replica(node: str, *layers: int, first: int = 0, num_micro_batches: int = 2) -> PlacedReplica:
    stages = tuple(PlacedStage((Device(node, first + i),), n) for i, n in enumerate(layers))
    return PlacedReplica(stages, num_micro_batches)


def test_layers_are_grouped_by_their_holders() -> None:
    model = make_workload(tied_embeddings=False, position_embedding="rope").model
    placement = Placement((replica("a", 1, 3), replica("b", 2, 2)))
    layer = layer_params(model, even_share(model, 1))
    found = [(g.holders, g.num_params) for g in sync_groups(placement, model, 1024)]
    # As the backward pass comes by: output layer, deep layers first, embedding.
    assert found == [
        (((0, 1), (1, 1)), 1024 * 512),
        (((0, 1), (1, 1)), 2 * layer),
        (((0, 1), (1, 0)), layer),
        (((0, 0), (1, 0)), layer),
        (((0, 0), (1, 0)), 1024 * 512),
    ]


def test_tied_embeddings_are_held_by_both_ends() -> None:
    model = make_workload(tied_embeddings=True).model
    alone = Placement((replica("a", 2, 2),))
    groups = list(sync_groups(alone, model, 1024))
    assert [g.holders for g in groups] == [((0, 0), (0, 1))]
    assert not list(sync_groups(Placement((replica("a", 4),)), model, 1024))


def test_two_replicas_on_two_nodes_send_every_gradient_once_each_way() -> None:
    model = make_workload(tied_embeddings=False, position_embedding="rope").model
    placement = Placement((replica("a", 4), replica("b", 4)))
    params = 4 * layer_params(model, even_share(model, 1)) + 2 * 1024 * 512
    # Head, layers and embedding begin together: they take turns, their latency passes once.
    expected = 4 * params / BETWEEN.bytes_per_s + 2 * BETWEEN.latency_s
    exchange = GradientExchangePrices(CLUSTER, model, 4, None)
    assert exchange.alone_s(placement, 1024) == pytest.approx(expected)


def test_stages_of_a_node_share_its_card() -> None:
    model = make_workload(tied_embeddings=False, position_embedding="rope").model
    one = Placement((replica("a", 4), replica("b", 4)))
    two = Placement((replica("a", 2, 2), replica("b", 2, 2)))
    exchange = GradientExchangePrices(CLUSTER, model, 4, None)
    times = [exchange.alone_s(p, 1024) for p in (one, two)]
    assert times[1] == pytest.approx(times[0], rel=0.01)


UNTIED = make_workload(tied_embeddings=False, position_embedding="rope").model


def test_a_ring_passes_a_slow_link_twice_not_at_every_round() -> None:
    """Four replicas on two sites: one pass leads over the long way once, back once."""
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2), between=Link(1e12, 10e-3))
    placement = Placement((*(replica("a", 4, first=i) for i in (0, 1)),
                           *(replica("b", 4, first=i) for i in (0, 1))))  # fmt: skip
    (head, layers, embedding) = GradientExchangePrices(cluster, UNTIED, 4, None).groups(
        placement, 1024
    )
    assert [g.group.holders for g in (head, layers, embedding)] == [
        ((0, 0), (1, 0), (2, 0), (3, 0))
    ] * 3
    latency_s = 2 * (2 * 10e-3 + INSIDE.latency_s)
    assert layers.gradients.latency_s == pytest.approx(latency_s)


def test_the_distributed_optimizer_sends_parts_to_owners_and_weights_back() -> None:
    """Two replicas: half of the gradients there, half of the 16-bit weights back."""
    placement = Placement((replica("a", 4), replica("b", 4)))
    params = 4 * layer_params(UNTIED, even_share(UNTIED, 1)) + 2 * 1024 * 512
    exchange = GradientExchangePrices(CLUSTER, UNTIED, 4, 2)
    # Two of the three exchanges are under way at a time; bytes cover the latency of all but one.
    busy_s = (0.5 * 4 + 0.5 * 2) * params / BETWEEN.bytes_per_s
    assert exchange.alone_s(placement, 1024) == pytest.approx(busy_s + 2 * BETWEEN.latency_s)
    # Parts cross between all pairs: of eight holders on two nodes 4 * 4 / 8 of the buffer.
    eight = Placement(tuple(replica(n, 4, first=i) for n in "ab" for i in range(4)))
    direct_s = (4 * 4 / 8 * 4 + 7 / 8 * 2) * params / BETWEEN.bytes_per_s
    assert exchange.alone_s(eight, 1024) == pytest.approx(direct_s, rel=0.01)


def test_stages_that_end_early_exchange_in_the_bubble() -> None:
    """What comes after the pipeline is the exchange of the first stage, which ends last."""
    placement = Placement((replica("a", 2, 2), replica("b", 2, 2)))
    exchange = GradientExchangePrices(CLUSTER, UNTIED, 4, None)
    alone_s = exchange.alone_s(placement, 1024)
    ends = [StageEnd(1.0 - 0.5 * s, 0.0) for _ in (0, 1) for s in (0, 1)]
    late_s = exchange.exposed_s(placement, 1024, ends, 1.0)
    assert late_s == pytest.approx(alone_s / 2, rel=0.01)


def test_an_exchange_within_the_backward_pass_ends_with_its_last_bucket() -> None:
    """Buckets of about a layer; the last one is complete with the pass, the others before."""
    model = make_workload(8, 4096, tied_embeddings=False, position_embedding="rope").model
    placement = Placement((replica("a", 8), replica("b", 8)))
    exchange = GradientExchangePrices(CLUSTER, model, 4, None)
    whole_s = exchange.alone_s(placement, 1024)
    plain, slow, fast = (
        exchange.exposed_s(placement, 1024, [StageEnd(pass_s, spent_s)] * 2, pass_s)
        for pass_s, spent_s in ((9.0, 0.0), (100 * whole_s, 100 * whole_s), (1e-6, 1e-6))
    )
    assert plain == pytest.approx(whole_s)
    # A long pass hides all but its last bucket and the embedding; a short one hides nothing.
    assert whole_s / 40 < slow < whole_s / 8
    assert fast == pytest.approx(whole_s, rel=1e-3)


def test_uneven_shares_pace_the_exchange_by_the_largest() -> None:
    model = make_workload(tied_embeddings=False, position_embedding="rope").model

    def exchange_s(shares: tuple[int, ...] | None) -> float:
        groups = [tuple(Device("a", i) for i in pair) for pair in ((0, 1), (2, 3))]
        stages = [PlacedStage(devices, 4, shares) for devices in groups]
        placement = Placement(tuple(PlacedReplica((stage,), 2) for stage in stages))
        return GradientExchangePrices(CLUSTER, model, 4, None).alone_s(placement, 1024)

    assert exchange_s((3, 1)) == pytest.approx(1.5 * exchange_s(None), rel=0.05)
