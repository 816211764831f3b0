"""Construction of plans: from a layout line, or from replicas on devices (hosts, rank order)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import batched, chain

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.hosts import hosts_of
from megatron_hetero.plan.plan import Host, Layout, Plan, Replica, ReplicaShape, Stage


def plan_from_layout(layout: Layout, workload: Workload | None = None) -> Plan:
    """Build the plan of a bare layout: no devices, nothing but what the line says.

    Raises:
        PlanFormatError: the layout breaks an invariant (of `workload`'s model too, when given).
    """
    plan = Plan(tuple(replica_from_shape(r) for r in layout.replicas), workload=workload)
    validate_plan(plan)
    return plan


def replica_from_shape(shape: ReplicaShape) -> Replica:
    """Build a replica without devices whose stages hold layers 0, 1, ... one after the other."""
    stages = []
    first_layer = 0
    for stage_shape in shape.stages:
        stages.append(Stage(stage_shape, first_layer))
        first_layer += stage_shape.num_layers
    return Replica(tuple(stages), shape.num_micro_batches, shape.micro_batch_size)


def canonical_hosts(replicas: Sequence[Replica], cluster: Cluster) -> tuple[Host, ...]:
    """Order the machines of the replicas, in plans that stock Megatron cannot number
    (`stock_ranks.hosts_in_rank_order` orders stock plans).

    Machines come site by site, on the tour of the sites on which rings are short
    (`Cluster.site_places`), and in cluster order on a site.  But the site, and there the machine,
    of the plan's last device comes last: Megatron prints the log on the last global rank, which
    has to be the last tensor rank of the last stage of the last replica.  On a machine, GPUs come
    in the order of their places (replica, stage, tensor rank).  A stage that spans machines may
    then need `in_rank_order`.

    `replicas` name devices of `cluster`; whether they do is checked by `validate_plan`.
    """
    # A device names a node; its host is the machine, of which the node may be an island.
    used = (d for replica in replicas for stage in replica.stages for d in stage.devices)
    hosts = {host.node: host for host in hosts_of(used, cluster)}
    last = cluster.device_by_name[replicas[-1].stages[-1].devices[-1]]
    last_node = cluster.node_by_name[last.node]
    # Sites turn on the tour until the last device's site is the last one.
    place = cluster.site_places
    behind = place[last_node.site] + 1
    # One entry for each machine in use, by its first node: islands of a machine share its site.
    machines = [nodes[0] for name, nodes in cluster.machines.items() if name in hosts]
    # `sort` keeps the cluster's order inside a site, but for the last device's machine.
    machines.sort(
        key=lambda n: ((place[n.site] - behind) % len(place), n.machine == last_node.machine)
    )
    return tuple(hosts[node.machine] for node in machines)


def in_rank_order(replicas: Sequence[Replica], hosts: Sequence[Host]) -> tuple[Replica, ...]:
    """Sort every stage's devices (and their shares) into global rank order."""
    # Ranks are numbered host by host, and on a host in the order of its GPUs.
    devices = (f"{host.node}:{index}" for host in hosts for index in host.gpu_indices)
    rank_of_device = {device: rank for rank, device in enumerate(devices)}
    return tuple(
        replace(r, stages=tuple(_sort_stage(s, rank_of_device) for s in r.stages)) for r in replicas
    )


def _sort_stage(stage: Stage, rank_of_device: dict[str, int]) -> Stage:
    # The devices are sorted, and every table with one entry for each of these goes along.
    shape = stage.shape
    if shape.context_parallel == 1:
        order = sorted(range(shape.num_devices), key=lambda i: rank_of_device[stage.devices[i]])
        shares, experts = (_taken(own, order) for own in (shape.shares, shape.expert_shares))
        return replace(
            stage,
            devices=tuple(stage.devices[i] for i in order),
            shape=replace(shape, shares=shares, expert_shares=experts),
        )
    # Whole groups of tensor-parallel ranks: who is in a group with whom stays, and so do the shares
    # in a group, which are those of every group.
    rank_of = rank_of_device.__getitem__
    groups = list(batched(stage.devices, shape.tensor_parallel))
    order = sorted(range(len(groups)), key=lambda i: min(map(rank_of, groups[i])))
    if shape.shares is None and shape.expert_shares is None:
        groups = [tuple(sorted(group, key=rank_of)) for group in groups]
    return replace(
        stage,
        devices=tuple(chain.from_iterable(groups[i] for i in order)),
        shape=replace(shape, context_shares=_taken(shape.context_shares, order)),
    )


def _taken(items: tuple[int, ...] | None, order: Sequence[int]) -> tuple[int, ...] | None:
    return None if items is None else tuple(items[i] for i in order)
