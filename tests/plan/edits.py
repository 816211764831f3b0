"""A sound plan with devices and estimates, and edits of single fields, each giving a new plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_hetero.plan.build import canonical_hosts, in_rank_order
from megatron_hetero.plan.estimates import DeviceEstimate, Estimates
from megatron_hetero.plan.plan import Plan, ReplicaShape, StageShape
from tests.plan.strategies import GIB, MODEL, RTX_4090, cluster_of, node, place, workload

CLUSTER = cluster_of(node("a", 4), node("b", 3, RTX_4090))


def sound_plan() -> Plan:
    """tp4:5,tp1:3 @12 | tp1:8 @4 on a:0-3, b:0 and b:2; b:1 is idle."""
    shapes = [
        ReplicaShape((StageShape(4, 5), StageShape(1, 3)), 12),
        ReplicaShape((StageShape(1, 8),), 4),
    ]
    replicas = place(shapes, ["a:0", "a:1", "a:2", "a:3", "b:0", "b:2"])
    hosts = canonical_hosts(replicas, CLUSTER)
    return Plan(
        in_rank_order(replicas, hosts),
        workload=workload(),
        hosts=hosts,
        idle_devices=("b:1",),
        idle_reasons={"b:1": "no use"},
        estimates=Estimates(
            step_time_s=2.0,
            tokens_per_s=100.0,
            bound_s=1.5,
            gap=1 / 3,
            replica_times_s=(2.0, 1.0),
            stage_times_s=((0.1, 0.1), (0.2,)),
            boundary_times_s=((0.01,), ()),
            gradient_sync_s=0.1,
            devices={"a:0": DeviceEstimate(40 * GIB, 20 * GIB, {"weights": 20 * GIB})},
        ),
    )


PLAN = sound_plan()


def with_stage(plan: Plan, r: int, s: int, **changes: Any) -> Plan:
    stages = list(plan.replicas[r].stages)
    stages[s] = replace(stages[s], **changes)
    return with_replica(plan, r, stages=tuple(stages))


def with_shape(plan: Plan, r: int, s: int, **changes: Any) -> Plan:
    return with_stage(plan, r, s, shape=replace(plan.replicas[r].stages[s].shape, **changes))


def with_replica(plan: Plan, r: int, **changes: Any) -> Plan:
    replicas = list(plan.replicas)
    replicas[r] = replace(replicas[r], **changes)
    return replace(plan, replicas=tuple(replicas))


def with_host(plan: Plan, i: int, **changes: Any) -> Plan:
    hosts = list(plan.hosts)
    hosts[i] = replace(hosts[i], **changes)
    return replace(plan, hosts=tuple(hosts))


def with_estimates(plan: Plan, **changes: Any) -> Plan:
    assert plan.estimates is not None
    return replace(plan, estimates=replace(plan.estimates, **changes))


def with_training(plan: Plan, **changes: Any) -> Plan:
    assert plan.workload is not None
    training = replace(plan.workload.training, **changes)
    return replace(plan, workload=replace(plan.workload, training=training))


def with_model(plan: Plan, **changes: Any) -> Plan:
    assert plan.workload is not None
    return replace(plan, workload=replace(plan.workload, model=replace(MODEL, **changes)))


def with_orders(order: str) -> Plan:
    """The plan with one order on both stages of replica 0."""
    return with_stage(with_stage(PLAN, 0, 0, order=order), 0, 1, order=order)


def with_context(plan: Plan, size: int, shares: tuple[int, ...] | None = None) -> Plan:
    """The plan without devices and fused attention, its first stage on `size` tensor-parallel
    groups."""
    bare = tuple(
        replace(r, stages=tuple(replace(s, devices=()) for s in r.stages)) for r in plan.replicas
    )
    plan = replace(plan, replicas=bare, hosts=(), idle_devices=(), idle_reasons={}, estimates=None)
    plan = with_training(plan, flash_attention=shares is None)
    return with_shape(plan, 0, 0, context_parallel=size, context_shares=shares)
