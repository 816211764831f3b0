"""The bound of plans whose tensor-parallel groups mix GPUs: below every such plan, and not idle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.estimate import estimates_of
from megatron_hetero.bounds.free_groups import free_groups_bound_s
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers=8", "--hidden-size=1024", "--num-attention-heads=8", "--seq-length=512",
    "--max-position-embeddings=512", "--vocab-size=8000", "--micro-batch-size=1",
    "--global-batch-size=24", "--bf16",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster(ROOT / "benchmarks/boxes/a100-40-a100-80-l40s.yaml")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    path = tmp_path_factory.mktemp("job") / "job.flags"
    path.write_text(" ".join(FLAGS), encoding="utf-8")
    return load_workload(path, ())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_group_in_any_shares_beats_the_bound(
    cluster: Cluster, workload: Workload, data: st.DataObject
) -> None:
    devices = data.draw(st.permutations(cluster.devices))
    width = data.draw(st.integers(2, 3))
    shares = tuple(data.draw(st.lists(st.integers(1, 6), min_size=width, max_size=width)))
    sequence_parallel = width != 3 and data.draw(st.booleans())
    training = replace(workload.training, sequence_parallel=sequence_parallel)
    costs = CostModel(cluster, replace(workload, training=training))
    group = PlacedStage(tuple(devices[:width]), 8, shares)
    stages = (group,)
    if width == 2 and data.draw(st.booleans()):
        own = data.draw(st.integers(1, 7))
        alone = PlacedStage((devices[2],), 8 - own)
        stages = (replace(group, num_layers=own), alone)
    placement = Placement((PlacedReplica(stages, 24),))
    cost = costs.placement(placement)
    bound_s = free_groups_bound_s(costs)
    assert bound_s is not None
    assert bound_s <= cost.step_time_s
    estimates = estimates_of(costs, placement, cost)
    assert estimates.bound_s is not None and estimates.bound_relaxes
    assert estimates.gap == pytest.approx(cost.step_time_s / estimates.bound_s - 1)


def test_the_bound_is_the_work_of_all_gpus(cluster: Cluster, workload: Workload) -> None:
    """One GPU of two equal halves of the work: half of the bound of one alone."""
    one = replace(cluster, nodes=cluster.nodes[:1])
    twin = replace(cluster.nodes[0], name="server/other", gpu_indices=(1,))
    two = replace(cluster, nodes=(cluster.nodes[0], twin))
    alone = free_groups_bound_s(CostModel(one, workload))
    both = free_groups_bound_s(CostModel(two, workload))
    assert alone is not None and both is not None
    assert both == pytest.approx(alone / 2)
