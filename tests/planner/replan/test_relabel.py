"""Equal GPUs exchanged: everything of a placement that names a device names the new one."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.memory.holdings import StateSizes, holdings, parts_of_placement
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.placing import with_expert_groups, with_sharded_layers
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.replan.relabel import nearest_labels
from tests.cost.builders import FAST, make_cluster, make_workload

PROBLEM = make_problem(
    make_cluster(("a", FAST, 2), ("b", FAST, 2), ("c", FAST, 2)),
    make_workload(
        num_layers=4,
        global_batch_size=8,
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=256,
        sequence_parallel=True,
        use_distributed_optimizer=True,
    ),
)


def placed(*nodes: str) -> Placement:
    """A replica of one GPU for each GPU of the nodes."""
    return Placement(
        tuple(
            PlacedReplica((PlacedStage((Device(node, index),), 4),), 2)
            for node in nodes
            for index in (0, 1)
        )
    )


def near(placement: Placement, old: Placement) -> Placement:
    workload = PROBLEM.workload
    kept = holdings(workload, parts_of_placement(old))
    return nearest_labels(PROBLEM, placement, kept, StateSizes(workload))


def test_a_group_of_experts_is_of_the_new_devices() -> None:
    placement = replace(placed("a", "b"), dispatcher="alltoall")
    moved = near(with_expert_groups(placement, (2, 1)), placed("b", "c"))
    assert {device.node for device in moved.devices()} == {"b", "c"}
    plain = near(placement, placed("b", "c"))
    assert moved == with_expert_groups(plain, (2, 1)) and moved.dispatcher == "alltoall"


def test_sharded_layers_are_of_the_new_replicas() -> None:
    moved = near(with_sharded_layers(placed("a", "b"), [2]), placed("b", "c"))
    plain = Placement(tuple(replica.without_sharding for replica in moved.replicas))
    assert {device.node for device in plain.devices()} == {"b", "c"}
    assert moved == with_sharded_layers(plain, [2])
