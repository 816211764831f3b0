"""The price list as a whole: placements by their parts, and what changes a step's price."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.pipeline import pipeline_time_s
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.model.spec import Workload
from tests.cost.builders import (
    BETWEEN,
    FAST,
    FREE,
    SLOW,
    bytes_between_nodes,
    make_cluster,
    make_workload,
)
from tests.planner.naive import all_placements
from tests.planner.strategies import clusters, workloads

CLUSTER = make_cluster(("a", FAST, 2), ("b", SLOW, 2), limits=FREE)
WORKLOAD = make_workload(num_layers=6, global_batch_size=8, seq_length=1024)


def replica(*stages: tuple[str, int], number: int = 8) -> PlacedReplica:
    return PlacedReplica(
        tuple(
            PlacedStage(tuple(Device(name[0], int(i)) for i in name[1:]), n) for name, n in stages
        ),
        number,
    )


@settings(max_examples=12)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_a_step_is_its_parts(cluster: Cluster, workload: Workload) -> None:
    costs = CostModel(cluster, workload)
    for placement in list(all_placements(cluster, workload, costs))[:60]:
        cost = costs.placement(placement)
        rows = costs.vocab_rows(placement.widths)
        for placed, own in zip(placement.replicas, cost.replicas, strict=True):
            times = [stage.times for stage in own.stages]
            hops = own.forward_hops, own.backward_hops
            assert own.pipeline_s == pytest.approx(
                pipeline_time_s(times, *hops, placed.num_micro_batches)
            )
            assert own.least_s <= own.pipeline_s * (1 + 1e-12)
            assert len(own.ends_s) == len(own.stages)
        assert cost.step_time_s >= max(r.pipeline_s for r in cost.replicas)
        assert cost.gradient_sync_s <= costs.sync_s(placement, rows) * (1 + 1e-9)
        assert cost.update_s == max(s.update_s for r in cost.replicas for s in r.stages)
        if len(placement.replicas) == 1 and not workload.model.tied_embeddings:
            assert cost.gradient_sync_s == 0.0


def test_equal_questions_get_equal_answers() -> None:
    placement = Placement((replica(("a0", 3), ("b0", 3), number=4), replica(("a1", 6), number=4)))
    assert CostModel(CLUSTER, WORKLOAD).placement(placement) == CostModel(
        CLUSTER, WORKLOAD
    ).placement(placement)


def test_replicas_share_paths() -> None:
    """Two pipelines over one slow link: together no faster than the link carries both."""
    slow = replace(CLUSTER, node_links={pair: Link(2e8, 1e-5) for pair in CLUSTER.node_links})
    costs = CostModel(slow, WORKLOAD)
    two = Placement(
        (replica(("a0", 3), ("b0", 3), number=4), replica(("a1", 3), ("b1", 3), number=4))
    )
    cost = costs.placement(two)
    one_s = 1024 * 512 * 2 / 2e8
    assert cost.card_s == pytest.approx(8 * one_s)
    assert cost.pipelines_s >= cost.card_s


def test_traffic_is_boundaries_and_gradients() -> None:
    costs = CostModel(CLUSTER, make_workload(num_layers=6, global_batch_size=8, seq_length=1024))
    alone = Placement((replica(("a0", 3), ("b0", 3)),))
    cost = costs.placement(alone)
    activation = 1024 * 512 * 2
    boundaries = [(pair, size) for at, pair, size in costs.traffic(alone, cost) if at == (0, 0)]
    assert dict(boundaries) == {("a", "b"): 8 * activation, ("b", "a"): 8 * activation}
    total = bytes_between_nodes(costs, alone, cost)
    gradients = {pair: size for at, pair, size in costs.traffic(alone, cost) if at is None}
    for pair, size in boundaries:
        assert total[pair] == pytest.approx(size + gradients.get(pair, 0.0))
    assert gradients  # of tied words


def test_gradients_of_two_replicas_cross_once_each_way_and_back() -> None:
    workload = make_workload(num_layers=6, global_batch_size=8, tied_embeddings=False)
    costs = CostModel(CLUSTER, workload)
    two = Placement((replica(("a0", 6), number=4), replica(("b0", 6), number=4)))
    cost = costs.placement(two)
    found = bytes_between_nodes(costs, two, cost)
    num_params = sum(g for g in (6 * (12 * 512**2 + 13 * 512), 2 * 1024 * 512, 256 * 512))
    assert found["a", "b"] == pytest.approx(4 * num_params)
    assert found["b", "a"] == pytest.approx(4 * num_params)


def test_links_with_other_terms_carry_as_many_bytes() -> None:
    """Bytes come from seconds on plain links, whatever adding costs."""
    workload = make_workload(num_layers=6, global_batch_size=8)
    two = Placement((replica(("a0", 6), number=4), replica(("b0", 6), number=4)))
    slow = replace(BETWEEN, reduce_bytes_per_s=1e9)
    changed = replace(CLUSTER, node_links=dict.fromkeys(CLUSTER.node_links, slow))
    found = []
    for cluster in (CLUSTER, changed):
        costs = CostModel(cluster, workload)
        cost = costs.placement(two)
        found.append((bytes_between_nodes(costs, two, cost), cost.gradient_sync_s))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] < found[1][1]


def test_overlap_hides_exchange() -> None:
    workload = make_workload(num_layers=6, global_batch_size=8, tied_embeddings=False)
    hidden = replace(workload, training=replace(workload.training, overlap_grad_reduce=True))
    two = Placement((replica(("a0", 6), number=4), replica(("b0", 6), number=4)))
    times = [CostModel(CLUSTER, w).placement(two).gradient_sync_s for w in (workload, hidden)]
    assert 0 < times[1] < times[0]


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_the_least_exchange_is_below_every_exchange(num_replicas: int) -> None:
    workload = make_workload(num_layers=6, global_batch_size=8, tied_embeddings=False)
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4))
    costs = CostModel(cluster, workload)
    names = ["a0", "b0", "a1", "b1"][:num_replicas]
    placement = Placement(tuple(replica((name, 6), number=2) for name in names))
    least = costs.least_sync(cluster.nodes[0], 1, num_replicas)
    whole_s = 6 * least.layer_s + least.embedding_s + least.head_s
    assert whole_s <= costs.placement(placement).gradient_sync_s * (1 + 1e-9)
    assert whole_s > 0
    overlapped = replace(workload, training=replace(workload.training, overlap_grad_reduce=True))
    assert CostModel(cluster, overlapped).least_sync(cluster.nodes[0], 1, 2).layer_s == 0.0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_replica_of_another_size_is_a_job_of_that_size(size: int) -> None:
    own = replace(replica(("a0", 3), ("b0", 3), number=8 // size), micro_batch_size=size)
    there = CostModel(CLUSTER, WORKLOAD).replica(own, 1024)
    changed = replace(WORKLOAD, training=replace(WORKLOAD.training, micro_batch_size=size))
    here = CostModel(CLUSTER, changed).replica(replace(own, micro_batch_size=None), 1024)
    assert there == here
