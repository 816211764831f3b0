"""The memory of a stage: mixed groups, and launched forwards."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.memory.stage import tightest
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedStage
from tests.cost.builders import FAST, FREE, SLOW, make_cluster
from tests.cost.test_model import CLUSTER, WORKLOAD, replica


def test_the_fullest_gpu_of_a_mixed_group_is_the_stages_memory() -> None:
    small = replace(SLOW, memory_bytes=1 << 30)
    costs = CostModel(make_cluster(("a", FAST, 2), ("b", small, 2), limits=FREE), WORKLOAD)
    own = replica(("a0", 6))
    stage = PlacedStage((Device("a", 0), Device("b", 0)), 6, (3, 1))
    memories = costs.stage_memories(replace(own, stages=(stage,)), 0, 1024)
    assert [m.capacity_bytes for m in memories] == [FAST.memory_bytes, 1 << 30]
    assert costs.stage_memory(replace(own, stages=(stage,)), 0, 1024) is tightest(memories, 6)
    cost = costs.stage(replace(own, stages=(stage,)), 0, 1024)
    assert cost.device_memory(1).capacity_bytes == 1 << 30
    even = costs.stage_memories(replica(("a01", 6)), 0, 1024)
    assert even[0] is even[1]


def test_more_launched_forwards_keep_more() -> None:
    costs = CostModel(CLUSTER, WORKLOAD)
    peaks = []
    for counts in (None, (3, 1), (5, 1), (8, 1)):
        own = replace(replica(("a0", 3), ("b0", 3)), launch_counts=counts)
        peaks.append(costs.stage_memory(own, 0, 1024).peak_bytes(3))
    assert peaks == sorted(peaks) and len(set(peaks)) == 4
