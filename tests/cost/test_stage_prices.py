"""The prices of a stage: recompute, mixed groups, and launched forwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.memory.stage import tightest
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedStage
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload
from tests.cost.test_model import CLUSTER, WORKLOAD, replica


def test_some_layers_recomputed_lie_between_none_and_all() -> None:
    costs = CostModel(CLUSTER, WORKLOAD)
    times, peaks = [], []
    for some in (0, 1, 3, 5, 6):
        own = replica(("a0", 6))
        (stage,) = own.stages
        if some:
            stage = replace(stage, recompute="full", recompute_num_layers=some % 6 or None)
        found = costs.stage(replace(own, stages=(stage,)), 0, 1024)
        times.append(found.times.total_s)
        peaks.append(found.memory.parts_bytes(6)["activations"])
    assert times == sorted(times) and peaks == sorted(peaks, reverse=True)
    # Each layer that recomputes costs as much again, and saves as much.
    steps = [(times[i] - times[0]) / n for i, n in ((1, 1), (2, 3), (3, 5), (4, 6))]
    assert steps == pytest.approx([steps[0]] * 4)
    saved = [(peaks[0] - peaks[i]) / n for i, n in ((1, 1), (2, 3), (3, 5), (4, 6))]
    assert saved == pytest.approx([saved[0]] * 4)


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


def test_variants_share_the_price_of_equal_exchanges_alone() -> None:
    job = make_workload(precision="bf16", use_distributed_optimizer=True)
    costs = CostModel(make_cluster(("a", FAST, 2)), job)
    own = costs._exchange
    # Between precisions new weights travel in fp32: other bytes have prices of their own.
    assert costs.variant(precision="fp32")._exchange is not own
    # What exchanges do not depend on shares them.
    assert costs.variant(micro_batch_size=2)._exchange is own
    # Asked for again, each keeps what it knows.
    assert costs._exchange is own
