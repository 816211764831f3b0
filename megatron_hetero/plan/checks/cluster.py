"""Invariants of a plan against the cluster it is for: the devices are there, the limits hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron_hetero.cluster.names import device_place
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import some_of
from megatron_hetero.plan.checks.violation import (
    Violation,
    layer_range,
    stage_key,
    stage_name,
    stages,
)
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.communication.libraries import library_of
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.units import format_bytes


def hosts_are_the_clusters(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Find hosts whose machine, address, library or GPUs differ from the cluster's."""
    for i, host in enumerate(plan.hosts):
        key = ("hosts", i)
        # `host.node` names a machine, whose islands are nodes of the cluster.
        islands = cluster.machines.get(host.node, ())
        if not islands:
            yield Violation(
                (*key, "node"),
                f"machine {host.node} is not in the cluster, which has "
                f"{some_of(list(cluster.machines))}.",
            )
            continue
        # The machine itself: its address and its library.
        node = islands[0]
        if host.host != node.host:
            yield Violation(
                (*key, "host"),
                f"machine {host.node} has the address {host.host} in the plan, {node.host} in the "
                "cluster.",
            )
        if library_of(host) != node.gpu_type.library:
            yield Violation(
                (*key, "library"),
                f"machine {host.node} speaks {library_of(host)} in the plan, "
                f"{node.gpu_type.library} in the cluster. Plan again for this cluster.",
            )
        elif cluster.limits.library not in (None, node.gpu_type.library):
            # A plan may be for the library of the machine, and yet against the limit.
            yield Violation(
                (*key, "library"),
                f"machine {host.node} speaks {node.gpu_type.library}; the cluster's limits keep to "
                f"GPUs with {cluster.limits.library}.",
            )
        # Its GPUs: each is there, and of the type planned for.
        num_gpus = sum(island.num_gpus for island in islands)
        for index, (device, gpu_type) in zip(
            host.gpu_indices, host.type_by_device.items(), strict=True
        ):
            # An index that is not there has no type to compare.
            if index >= num_gpus:
                yield Violation(
                    (*key, "gpu_indices"),
                    f"machine {host.node} has no GPU {index}; it has {num_gpus} (0-"
                    f"{num_gpus - 1}).",
                )
                continue
            there = cluster.node_of(device).gpu_type.name
            if gpu_type != there:
                yield Violation(
                    (*key, "gpu_types" if host.gpu_types else "gpu_type"),
                    f"{device} is {gpu_type} in the plan, {there} in the cluster; the plan is for "
                    "other hardware. Plan again for this cluster.",
                )


def every_device_is_used_or_idle(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Find devices of the cluster that are neither used nor idle, and idle devices unknown to the
    cluster."""
    if not plan.hosts:
        return
    # A dict, so that messages come in the cluster's order.
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
    """Find devices in use that `limits.idle_devices` keeps idle."""
    limit = set(cluster.limits.idle_devices)
    for r, s, stage in stages(plan):
        for device in stage.devices:
            # The limit may name a device or the whole machine.
            if device in limit or device_place(device)[0] in limit:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)} uses {device}, which the cluster's limits keep idle.",
                )


def size_limits_hold(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Find more replicas, deeper pipelines or wider groups than the cluster's limits allow."""
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
    """Find first and last stages outside of the nodes given by the limits."""
    for r, replica in enumerate(plan.replicas):
        for s, pins in (
            (0, cluster.limits.first_stage_nodes),
            (len(replica.stages) - 1, cluster.limits.last_stage_nodes),
        ):
            # Without pins every device is a stranger, which the next condition lets pass.
            strangers = [
                d for d in replica.stages[s].devices if cluster.node_of(d).name not in pins
            ]
            if pins and strangers:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)} uses {some_of(strangers)}; the cluster's limits pin it to "
                    f"{some_of(pins)}.",
                )


def tensor_parallel_stays_where_allowed(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Find tensor-parallel groups that span nodes or sites against the limits."""
    forbidden = cluster.limits.no_tensor_parallel_across
    for r, s, stage in stages(plan):
        width = stage.shape.tensor_parallel
        # Context parallelism may span what tensor parallelism may not: each group counts alone.
        groups = [stage.devices[i : i + width] for i in range(0, len(stage.devices), width)]
        nodes = [sorted({cluster.node_of(d).machine for d in group}) for group in groups]
        sites = [sorted({cluster.node_of(d).site for d in group}) for group in groups]
        islands = sorted({cluster.node_of(device).name for device in stage.devices})
        for kind, spans in (("nodes", nodes), ("sites", sites)):
            # One message a stage: about the group that spans the most.
            found = max(spans, key=len, default=[])
            if kind in forbidden and len(found) > 1:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)}: its tensor-parallel group spans {kind} {some_of(found)}; "
                    f"the cluster's limits forbid tensor parallelism across {kind}.",
                )
        # Nodes may be named one by one too, as where the GPUs of one have no link.
        for node in islands:
            if node in forbidden and width > 1:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)} has tensor-parallel width {width} on node "
                    f"{node}; the cluster's limits forbid tensor parallelism there.",
                )


def data_parallel_stays_in_sites(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Find layers whose gradients would be exchanged between sites against the limits: devices of
    different replicas that hold the same layer exchange its gradient."""
    if not cluster.limits.no_data_parallel_across_sites or len(plan.replicas) < 2:
        return
    sites_of_layer: dict[int, set[str]] = defaultdict(set)
    for _, _, stage in stages(plan):
        for chunk in stage_chunks(stage):
            for layer in range(chunk.first_layer, chunk.first_layer + chunk.num_layers):
                sites_of_layer[layer].update(_sites(stage, cluster))
    # Only the first such layer is shown; the number of all of them says how much is wrong.
    layers = [layer for layer in sorted(sites_of_layer) if len(sites_of_layer[layer]) > 1]
    if layers:
        yield Violation(
            ("replicas",),
            f"replicas hold {layer_range(layers[0], layers[0])} on sites "
            f"{some_of(sorted(sites_of_layer[layers[0]]))} ({len(layers)} layers in all); the "
            "cluster's limits forbid data parallelism across sites. Cut all replicas so that each "
            "layer stays on one site.",
        )


def price_limit_holds(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Find a price per hour that is above `limits.max_price_per_hour`, or not known."""
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
    """Find devices with an estimated peak above the GPU's memory."""
    if plan.estimates is None:
        return
    for device, estimate in sorted(plan.estimates.devices.items()):
        capacity_bytes = cluster.node_of(device).gpu_type.memory_bytes
        missing_bytes = estimate.peak_bytes - capacity_bytes
        if missing_bytes > 0:
            yield Violation(
                ("estimates", "devices", device, "peak_bytes"),
                f"{device} needs {format_bytes(estimate.peak_bytes)} at its peak; its GPU has "
                f"{format_bytes(capacity_bytes)}, {format_bytes(missing_bytes)} less. Give "
                "its stage fewer layers, more devices or recompute.",
            )


def _sites(stage: Stage, cluster: Cluster) -> list[str]:
    return sorted({cluster.node_of(device).site for device in stage.devices})


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
