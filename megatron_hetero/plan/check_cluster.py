"""Invariants of a plan against the cluster it is for: the devices are there, the limits hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.plan.violation import Violation, layer_range, stage_key, stage_name, stages
from megatron_hetero.units import format_bytes


def hosts_are_the_clusters(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    for i, host in enumerate(plan.hosts):
        key = ("hosts", i)
        node = cluster.node_by_name.get(host.node)
        if node is None:
            yield Violation(
                (*key, "node"),
                f"node {host.node} is not in the cluster, which has "
                f"{_names([n.name for n in cluster.nodes])}.",
            )
            continue
        if host.host != node.host:
            yield Violation(
                (*key, "host"),
                f"node {host.node} is on host {host.host} in the plan, {node.host} in the cluster.",
            )
        if host.gpu_type != node.gpu_type.name:
            yield Violation(
                (*key, "gpu_type"),
                f"node {host.node} has {host.gpu_type} in the plan, {node.gpu_type.name} in the "
                "cluster; the plan is for other hardware. Plan again for this cluster.",
            )
        for index in host.gpu_indices:
            if index >= node.num_gpus:
                yield Violation(
                    (*key, "gpu_indices"),
                    f"node {host.node} has no GPU {index}; it has {node.num_gpus} "
                    f"(0-{node.num_gpus - 1}).",
                )


def every_device_is_used_or_idle(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    if not plan.hosts:
        return
    known = dict.fromkeys(device.name for device in cluster.devices)
    idle = set(plan.idle_devices)
    for device in plan.idle_devices:
        if device not in known:
            yield Violation(
                ("idle_devices",), f"idle device {device} is not in the cluster; remove it."
            )
    used = {device for _, _, stage in stages(plan) for device in stage.devices}
    for device in known:
        if device not in used and device not in idle:
            yield Violation(
                ("idle_devices",),
                f"device {device} of the cluster is in no stage and not among idle_devices; "
                "use it or list it.",
            )


def idle_limit_holds(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    limit = set(cluster.limits.idle_devices)
    for r, s, stage in stages(plan):
        for device in stage.devices:
            if device in limit or _node(device) in limit:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)} uses {device}, which the cluster's limits keep idle.",
                )


def size_limits_hold(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    limits = cluster.limits
    if limits.num_replicas is not None and len(plan.replicas) != limits.num_replicas:
        yield Violation(
            ("replicas",),
            f"the plan has {len(plan.replicas)} replicas; the cluster's limits ask for "
            f"{limits.num_replicas}.",
        )
    for r, replica in enumerate(plan.replicas):
        depth = len(replica.stages)
        if limits.max_pipeline_parallel is not None and depth > limits.max_pipeline_parallel:
            yield Violation(
                ("replicas", r, "stages"),
                f"replica {r} has {depth} stages; the cluster's limits allow "
                f"{limits.max_pipeline_parallel}.",
            )
    for r, s, stage in stages(plan):
        width = stage.shape.tensor_parallel
        if limits.max_tensor_parallel is not None and width > limits.max_tensor_parallel:
            yield Violation(
                stage_key(r, s, "shape", "tensor_parallel"),
                f"{stage_name(r, s)} has tensor-parallel width {width}; the cluster's limits "
                f"allow {limits.max_tensor_parallel}.",
            )


def pinned_stages_are_where_they_belong(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    for r, replica in enumerate(plan.replicas):
        for s, pins in (
            (0, cluster.limits.first_stage_nodes),
            (len(replica.stages) - 1, cluster.limits.last_stage_nodes),
        ):
            strangers = [d for d in replica.stages[s].devices if _node(d) not in pins]
            if pins and strangers:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)} uses {_names(strangers)}; the cluster's limits pin it to "
                    f"{_names(pins)}.",
                )


def tensor_parallel_stays_where_allowed(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    forbidden = cluster.limits.no_tensor_parallel_across
    for r, s, stage in stages(plan):
        nodes = sorted({_node(device) for device in stage.devices})
        spans = {"nodes": nodes, "sites": _sites(stage, cluster)}
        for kind, found in spans.items():
            if kind in forbidden and len(found) > 1:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)}: its tensor-parallel group spans {kind} {_names(found)}; "
                    f"the cluster's limits forbid tensor parallelism across {kind}.",
                )
        for node in nodes:
            if node in forbidden and len(stage.devices) > 1:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)} has tensor-parallel width {len(stage.devices)} on node "
                    f"{node}; the cluster's limits forbid tensor parallelism there.",
                )


def data_parallel_stays_in_sites(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Devices of different replicas that hold the same layer exchange its gradient."""
    if not cluster.limits.no_data_parallel_across_sites or len(plan.replicas) < 2:
        return
    sites_of_layer: dict[int, set[str]] = defaultdict(set)
    for _, _, stage in stages(plan):
        for layer in range(stage.first_layer, stage.first_layer + stage.shape.num_layers):
            sites_of_layer[layer].update(_sites(stage, cluster))
    layers = [layer for layer in sorted(sites_of_layer) if len(sites_of_layer[layer]) > 1]
    if layers:
        yield Violation(
            ("replicas",),
            f"replicas hold {layer_range(layers[0], layers[0])} on sites "
            f"{_names(sorted(sites_of_layer[layers[0]]))} ({len(layers)} layers in all); the "
            "cluster's limits forbid data parallelism across sites. Cut all replicas so that each "
            "layer stays on one site.",
        )


def price_limit_holds(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    limit = cluster.limits.max_price_per_hour
    if limit is None or plan.estimates is None:
        return
    price = plan.estimates.price_per_hour
    if price is None:
        yield Violation(
            ("estimates", "price_per_hour"),
            f"the cluster's limits allow {limit:g} an hour (max_price_per_hour), but not all "
            "machines of the plan have a price. Give price_per_hour for each node or GPU type.",
        )
    elif price > limit:
        yield Violation(
            ("estimates", "price_per_hour"),
            f"the machines of the plan cost {price:g} an hour; the cluster's limits allow "
            f"{limit:g} (max_price_per_hour). Use fewer or cheaper ones.",
        )


def estimated_memory_fits(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    if plan.estimates is None:
        return
    for device, estimate in sorted(plan.estimates.devices.items()):
        capacity_bytes = cluster.node_by_name[_node(device)].gpu_type.memory_bytes
        missing_bytes = estimate.peak_bytes - capacity_bytes
        if missing_bytes > 0:
            yield Violation(
                ("estimates", "devices", device, "peak_bytes"),
                f"{device} needs {format_bytes(estimate.peak_bytes)} at its peak; its GPU has "
                f"{format_bytes(capacity_bytes)}, {format_bytes(missing_bytes)} too little. Give "
                "its stage fewer layers, more devices or recompute.",
            )


def _node(device: str) -> str:
    return device.rpartition(":")[0]


def _sites(stage: Stage, cluster: Cluster) -> list[str]:
    return sorted({cluster.node_by_name[_node(device)].site for device in stage.devices})


def _names(names: list[str] | tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


INVARIANTS = (
    hosts_are_the_clusters,
    every_device_is_used_or_idle,
    idle_limit_holds,
    size_limits_hold,
    pinned_stages_are_where_they_belong,
    tensor_parallel_stays_where_allowed,
    data_parallel_stays_in_sites,
    price_limit_holds,
    estimated_memory_fits,
)
