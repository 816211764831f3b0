"""Ways of activations from stage to stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.schedule.network import crossing
from tests.cost.builders import FAST, make_cluster, make_workload, place


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("nodes", [(8,), (4, 4)])
def test_a_stock_rank_sends_its_part_of_the_sequence(
    nodes: tuple[int, ...], sequence_parallel: bool
) -> None:
    workload = make_workload(sequence_parallel=sequence_parallel)
    cluster = make_cluster(*((f"n{i}", FAST, count) for i, count in enumerate(nodes)))
    placed = placement_of(place("tp2cp2:2,tp2cp2:2 @4", workload, cluster), cluster)
    costs = CostModel(cluster, workload)
    sender, receiver = placed.replicas[0].stages
    found = crossing(costs, sender, receiver, is_stock=True)
    of_rank = costs.activation_bytes / (4 if sequence_parallel else 2)
    # Four ranks share the path between two nodes.
    assert found.num_bytes == of_rank * (1 if len(nodes) == 1 else 4)


def test_a_stock_stage_on_two_nodes_is_as_slow_as_its_slowest_pair() -> None:
    """Groups that divide sequences may lie on several nodes, whose links are unlike."""
    cluster = make_cluster(("a", FAST, 2), ("b", FAST, 1), ("c", FAST, 1))
    slow = replace(cluster.node_links["b", "c"], bytes_per_s=1e8, latency_s=1e-3)
    links = {**cluster.node_links, ("b", "a"): slow, ("a", "b"): slow}
    cluster = replace(cluster, node_links=links)
    plan = place("tp1cp2:2,tp1cp2:2 @4", make_workload(), make_cluster(("x", FAST, 4)))
    costs = CostModel(cluster, make_workload())
    sender, receiver = placement_of(plan, make_cluster(("x", FAST, 4))).replicas[0].stages
    sender = replace(sender, devices=(Device("c", 0), Device("b", 0)))
    receiver = replace(receiver, devices=(Device("a", 0), Device("a", 1)))
    found = crossing(costs, sender, receiver, is_stock=True)
    of_rank = costs.activation_bytes / 2
    assert found.serialisation_s == pytest.approx(of_rank / 1e8)
    assert found.latency_s == 1e-3
    assert [path for path, _ in found.hops] == ["c -> a", "b -> a"]
