from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.spec import Cluster, Link
from megatron_hetero.cost.estimate import estimate_plan
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import placement_of
from megatron_hetero.errors import PlanFormatError, UnsupportedError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 2), ("b", SLOW, 2))


def place(layout: str, workload: Workload | None, cluster: Cluster = CLUSTER) -> Plan:
    """A plan from a layout, its ranks on the cluster's devices in order."""
    plan = plan_from_layout(parse_layout(layout), workload)
    names = iter([device.name for device in cluster.devices])
    replicas = tuple(
        replace(
            r,
            stages=tuple(
                replace(s, devices=tuple(next(names) for _ in range(s.shape.tensor_parallel)))
                for s in r.stages
            ),
        )
        for r in plan.replicas
    )
    return replace(plan, replicas=replicas)


def test_a_step_is_pipeline_sync_and_update() -> None:
    workload = make_workload()
    plan = place("tp2:3,tp1:1 @3 | tp1:4 @1", workload)
    estimates = estimate_plan(plan, CLUSTER)
    cost = CostModel(CLUSTER, workload).placement(placement_of(plan, CLUSTER))
    assert estimates.step_time_s == pytest.approx(
        max(estimates.replica_times_s) + estimates.gradient_sync_s + cost.update_s
    )
    assert estimates.tokens_per_s == pytest.approx(4 * 256 / estimates.step_time_s)
    assert [len(times) for times in estimates.stage_times_s] == [2, 1]
    assert [len(times) for times in estimates.boundary_times_s] == [1, 0]
    assert estimates.gradient_sync_s > 0
    assert set(estimates.devices) == {"a:0", "a:1", "b:0", "b:1"}
    for device in estimates.devices.values():
        assert sum(device.parts_bytes.values()) == device.peak_bytes
    assert not estimates.measured
    assert estimates.bound_s is not None and 0 < estimates.bound_s < estimates.step_time_s
    assert "memory" in estimates.bound_relaxes


def test_a_single_device_takes_micro_batches_times_all_pieces() -> None:
    workload = make_workload()
    cluster = make_cluster(("a", FAST, 1))
    estimates = estimate_plan(place("tp1:4 @4", workload, cluster), cluster)
    pieces = CostModel(cluster, workload).pieces(cluster.nodes[0], 1, 1024)
    one = pieces.embedding.total_s + 4 * pieces.layer.total_s + pieces.head.total_s
    assert estimates.replica_times_s[0] == pytest.approx(4 * one)
    assert estimates.gradient_sync_s == 0


def test_what_cannot_be_estimated_is_refused_by_name() -> None:
    plan = place("tp2:3,tp1:1 @3 | tp1:4 @1", make_workload())
    with pytest.raises(UsageError, match="carries no model"):
        estimate_plan(replace(plan, workload=None), CLUSTER)
    with pytest.raises(PlanFormatError, match="b:1, which the cluster does not have"):
        estimate_plan(plan, make_cluster(("a", FAST, 2), ("b", SLOW, 1)))
    bare = plan_from_layout(parse_layout("tp1:4 @4"), make_workload())
    with pytest.raises(PlanFormatError, match="names no devices"):
        estimate_plan(bare, CLUSTER)
    shared = place("tp2(3:1):4 @4", make_workload())
    with pytest.raises(UnsupportedError, match="uneven shares"):
        estimate_plan(shared, CLUSTER)


def test_launch_counts_are_priced_in_time_and_memory() -> None:
    """A hand-edited plan: forwards ahead hide a hop of many milliseconds, for their activations."""
    workload = make_workload(global_batch_size=16)
    cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1), between=Link(1e9, 5e-3))
    plan = place("tp1:2,tp1:2 @16", workload, cluster)
    (replica,) = plan.replicas
    ahead, last = replica.stages
    edited = replace(
        plan,
        replicas=(replace(replica, stages=(replace(ahead, num_launched_forwards=10), last)),),
    )
    own, counted = estimate_plan(plan, cluster), estimate_plan(edited, cluster)
    assert counted.step_time_s < own.step_time_s / 2
    before, after = own.devices["a:0"].parts_bytes, counted.devices["a:0"].parts_bytes
    assert after["activations"] == 5 * before["activations"]
    # The runtime keeps what it sent, for up to as many forwards as it launches ahead.
    activation_bytes = 256 * 512 * 2
    assert after["buffers"] - before["buffers"] == (10 - 1) * activation_bytes
    same = replace(
        plan, replicas=(replace(replica, stages=(replace(ahead, num_launched_forwards=2), last)),)
    )
    assert estimate_plan(same, cluster) == own


def test_replicas_that_cross_the_same_path_take_turns() -> None:
    """Eight pipelines over a link that one alone would hardly fill."""
    cluster = make_cluster(("a", FAST, 8), ("b", FAST, 8), between=Link(2e8, 0.0))
    workload = make_workload(global_batch_size=64)
    names = [f"{node}:{i}" for i in range(8) for node in "ab"]
    plan = plan_from_layout(parse_layout(" | ".join(["tp1:2,tp1:2 @8"] * 8)), workload)
    replicas = tuple(
        replace(
            r, stages=tuple(replace(s, devices=(names[2 * i + j],)) for j, s in enumerate(r.stages))
        )
        for i, r in enumerate(plan.replicas)
    )
    costs = CostModel(cluster, workload)
    cost = costs.placement(placement_of(replace(plan, replicas=replicas), cluster))
    assert cost.card_s == pytest.approx(64 * costs.activation_bytes / 2e8)
    assert cost.pipelines_s == cost.card_s > max(r.pipeline_s for r in cost.replicas)
