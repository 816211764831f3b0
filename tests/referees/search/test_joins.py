"""Replicas side by side on the same nodes, joined into one."""

from __future__ import annotations

from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tools.referees.search.joins import joined_replicas


def node_layers(replica: PlacedReplica) -> dict[str, int]:
    found: dict[str, int] = {}
    for stage in replica.stages:
        node = stage.devices[0].node
        found[node] = found.get(node, 0) + stage.num_layers
    return found


def test_a_joined_replica_holds_on_each_node_what_each_of_them_held() -> None:
    workload = make_workload(num_layers=12, global_batch_size=24)
    problem = make_problem(make_cluster(("a", FAST, 4), ("b", SLOW, 4)), workload)
    replicas = [
        PlacedReplica(
            (PlacedStage((Device("a", i),), 8), PlacedStage((Device("b", i),), 4)),
            num_micro_batches=6,
        )
        for i in range(4)
    ]
    found = list(joined_replicas(problem, Placement(tuple(replicas))))
    assert [len(placement.replicas) for placement in found] == [3, 2, 1]
    for number, placement in zip((2, 3, 4), found, strict=True):
        joined, *rest = placement.replicas
        assert [s.num_layers for s in rest[0].stages] == [8, 4] if rest else number == 4
        assert node_layers(joined) == {"a": 8, "b": 4}
        assert [s.devices[0].node for s in joined.stages] == ["a"] * number + ["b"] * number
        devices = list(placement.devices())
        assert len(devices) == len(set(devices)) == 8
        assert sum(r.num_micro_batches for r in placement.replicas) == 24
        assert all(joined.num_micro_batches > r.num_micro_batches for r in rest)
    # Two groups on a node cannot share one layer, and unlike replicas are not joined.
    few = [
        PlacedReplica((PlacedStage((Device("a", i),), 11), PlacedStage((Device("b", i),), 1)), 6)
        for i in range(2)
    ]
    assert list(joined_replicas(problem, Placement(tuple(few)))) == []
    unlike = Placement((replicas[0], few[1]))
    assert list(joined_replicas(problem, unlike)) == []
