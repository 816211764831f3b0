"""The lower bound never passes the best plan, and says something."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.bound import step_time_bound, step_time_bound_s
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.spec import Workload
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import best_step_time_s
from tests.planner.strategies import clusters, workloads


@settings(max_examples=60, deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_is_faster_than_the_bound(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        assert step_time_bound_s(CostModel(cluster, workload)) <= best_s * (1 + 1e-9)


def test_a_model_that_needs_all_memory_is_bounded_by_it() -> None:
    """One GPU is fast, but holds few layers: the slow one must take the rest, and paces it."""
    workload = make_workload(
        num_layers=16, hidden_size=2048, seq_length=2048, global_batch_size=32, recompute="full"
    )
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 2))
    costs = CostModel(cluster, workload)
    bound = step_time_bound(costs)
    slow = costs.pieces(cluster.node_by_name["b"], 1, workload.model.vocab_size).layer.total_s
    fast = costs.pieces(cluster.node_by_name["a"], 1, workload.model.vocab_size).layer.total_s
    by_work_s = 32 * 16 / (1 / fast + 2 / slow)
    assert bound.step_time_s > 1.02 * by_work_s
    assert "memory" not in bound.relaxes


def test_one_gpu_is_bounded_by_its_own_work() -> None:
    workload = make_workload(num_layers=4, global_batch_size=8)
    cluster = make_cluster(("a", FAST, 1))
    costs = CostModel(cluster, workload)
    times = costs.pieces(cluster.nodes[0], 1, workload.model.vocab_size).stage(4, True, True)
    assert step_time_bound_s(costs) == pytest.approx(8 * times.total_s, rel=0.01)


def test_equal_questions_get_equal_bounds() -> None:
    workload = make_workload(num_layers=12, global_batch_size=16)
    bounds = set()
    for names in (("a", "b"), ("b", "a")):
        nodes = {"a": ("a", FAST, 4), "b": ("b", SLOW, 4)}
        cluster = make_cluster(*(nodes[name] for name in names))
        bounds.add(step_time_bound_s(CostModel(cluster, workload)))
    assert len(bounds) == 1
