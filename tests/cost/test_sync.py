from __future__ import annotations

import pytest

from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync import gradient_sync_s, sync_groups
from tests.cost.builders import BETWEEN, FAST, SLOW, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 4))


def replica(node: str, *layers: int, first: int = 0, num_micro_batches: int = 2) -> PlacedReplica:
    stages = tuple(PlacedStage((Device(node, first + i),), n) for i, n in enumerate(layers))
    return PlacedReplica(stages, num_micro_batches)


def test_layers_are_grouped_by_their_holders() -> None:
    model = make_workload(tied_embeddings=False, position_embedding="rope").model
    placement = Placement((replica("a", 1, 3), replica("b", 2, 2)))
    layer = layer_params(model, even_share(model, 1))
    found = [(g.holders, g.num_params) for g in sync_groups(placement, model, 1024)]
    assert found[:3] == [
        (((0, 0), (1, 0)), layer),
        (((0, 1), (1, 0)), layer),
        (((0, 1), (1, 1)), 2 * layer),
    ]
    assert found[3:] == [
        (((0, 0), (1, 0)), 1024 * 512),
        (((0, 1), (1, 1)), 1024 * 512),
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
    expected = 4 * params / BETWEEN.bytes_per_s + 3 * 2 * BETWEEN.latency_s
    assert gradient_sync_s(placement, CLUSTER, model, 1024, 4) == pytest.approx(expected)


def test_stages_of_a_node_share_its_card() -> None:
    model = make_workload(tied_embeddings=False, position_embedding="rope").model
    one = Placement((replica("a", 4), replica("b", 4)))
    two = Placement((replica("a", 2, 2), replica("b", 2, 2)))
    times = [gradient_sync_s(p, CLUSTER, model, 1024, 4) for p in (one, two)]
    assert times[1] == pytest.approx(times[0], rel=0.01)
