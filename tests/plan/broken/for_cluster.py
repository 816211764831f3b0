"""Plans that are sound, and do not fit a cluster: one invariant each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.checks import cluster as check_cluster
from megatron_hetero.plan.estimates import DeviceEstimate
from megatron_hetero.plan.plan import Plan
from tests.plan.edits import (
    CLUSTER,
    PLAN,
    with_estimates,
    with_host,
)
from tests.plan.strategies import (
    GIB,
    RTX_4090,
    cluster_of,
    node,
)


def limited(**limits: Any) -> Cluster:
    return replace(CLUSTER, limits=Limits(**limits))


BROKEN_FOR_CLUSTER: dict[Callable[..., Any], list[tuple[Plan, Cluster, str]]] = {
    check_cluster.hosts_are_the_clusters: [
        (PLAN, cluster_of(node("a", 4)), "machine b is not in the cluster, which has a"),
        (with_host(PLAN, 0, host="other"), CLUSTER, "has the address other in the plan, a.example"),
        (
            PLAN,
            cluster_of(node("a", 4, RTX_4090), node("b", 3, RTX_4090)),
            "a:0 is A100-40GB in the plan, RTX-4090 in the cluster",
        ),
        (PLAN, cluster_of(node("a", 4), node("b", 2, RTX_4090)), r"has no GPU 2; it has 2 \(0-1\)"),
    ],
    check_cluster.every_device_is_used_or_idle: [
        (
            replace(PLAN, idle_devices=(), idle_reasons={}),
            CLUSTER,
            "device b:1 of the cluster is in no stage and not among idle_devices",
        ),
        (replace(PLAN, idle_devices=("b:1", "c:0")), CLUSTER, "idle device c:0 is not in the"),
    ],
    check_cluster.idle_limit_holds: [
        (PLAN, limited(idle_devices=("a:2",)), "replica 0, stage 0 uses a:2, which"),
        (PLAN, limited(idle_devices=("b",)), "replica 0, stage 1 uses b:0, which"),
    ],
    check_cluster.size_limits_hold: [
        (PLAN, limited(num_replicas=3), "the plan has 2 replicas; .* ask for 3"),
        (PLAN, limited(max_pipeline_parallel=1), "replica 0 has 2 stages; .* allow 1"),
        (PLAN, limited(max_tensor_parallel=2), "has tensor-parallel width 4; .* allow 2"),
    ],
    check_cluster.pinned_stages_are_where_they_belong: [
        (PLAN, limited(first_stage_nodes=("a",)), "replica 1, stage 0 uses b:2; .* pin it to a"),
        (PLAN, limited(last_stage_nodes=("a",)), "replica 0, stage 1 uses b:0; .* pin it to a"),
    ],
    check_cluster.tensor_parallel_stays_where_allowed: [
        (PLAN, limited(no_tensor_parallel_across=("a",)), "width 4 on node a; .* forbid"),
    ],
    check_cluster.data_parallel_stays_in_sites: [
        (
            PLAN,
            replace(
                cluster_of(node("a", 4), node("b", 3, RTX_4090, site="cloud")),
                limits=Limits(no_data_parallel_across_sites=True),
            ),
            r"replicas hold layer 0 on sites cloud, main \(5 layers in all\)",
        ),
    ],
    check_cluster.price_limit_holds: [
        (
            with_estimates(PLAN, price_per_hour=6.5),
            limited(max_price_per_hour=6.0),
            "cost 6.5 an hour; the cluster's limits allow 6",
        ),
        (with_estimates(PLAN), limited(max_price_per_hour=6.0), "have a price"),
    ],
    check_cluster.estimated_memory_fits: [
        (
            with_estimates(PLAN, devices={"b:0": DeviceEstimate(80 * GIB, 30 * GIB, {})}),
            CLUSTER,
            "b:0 needs 30 GiB at its peak; its GPU has 24 GiB, 6 GiB less",
        ),
    ],
}
