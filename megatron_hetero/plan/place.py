"""Devices for a plan that names none: those of a cluster, in the order of its file."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import canonical_hosts, in_rank_order
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan, Stage


def place_in_order(plan: Plan, cluster: Cluster) -> Plan:
    """Give the stages of a plan the cluster's GPUs, replica by replica and stage by stage.

    A plan that names devices is returned as it is.

    Raises:
        PlanFormatError: the cluster has another number of GPUs, or a stage would span nodes.
    """
    if any(stage.devices for replica in plan.replicas for stage in replica.stages):
        return plan
    wanted = plan.layout.num_devices
    if wanted != len(cluster.devices):
        raise PlanFormatError(
            f"the plan names no devices and takes {wanted} GPUs, {cluster.source or 'the cluster'} "
            f"has {len(cluster.devices)}; name a cluster of {wanted} GPUs, which are then taken in "
            "order, or make the plan with `megatron-hetero plan`, which chooses them"
        )
    # Hand out GPUs in the order of the cluster; a stage stays inside a node (or island).
    free = iter(cluster.devices)

    def on_devices(stage: Stage, where: str) -> Stage:
        devices = [next(free) for _ in range(stage.shape.num_devices)]
        if len({device.node for device in devices}) > 1:
            raise PlanFormatError(
                f"the plan names no devices, and with GPUs taken in order {where} would have "
                f"{', '.join(f'{d.name} ({cluster.gpu_type(d).name})' for d in devices)}, which "
                "are not equal GPUs of one machine, joined alike; make the plan with "
                "`megatron-hetero plan`, which chooses devices, or order the machines of the "
                "cluster file, or the stages of the plan, so that each stage stays on such GPUs"
            )
        return replace(stage, devices=tuple(device.name for device in devices))

    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                on_devices(stage, f"replica {r}, stage {s}")
                for s, stage in enumerate(replica.stages)
            ),
        )
        for r, replica in enumerate(plan.replicas)
    )
    # Ranks on a machine follow the places of the plan.
    hosts = canonical_hosts(replicas, cluster)
    placed = replace(plan, replicas=in_rank_order(replicas, hosts), hosts=hosts)
    validate_plan(placed, cluster)
    return placed
