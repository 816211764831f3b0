"""Small clusters and workloads for tests of cost, schedule and planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hetero.bounds.estimate import estimates_of, workload_of
from megatron_hetero.cluster.limits import CHOICES, Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan

GIB = 1 << 30

FAST = GpuType(
    "FAST",
    40 * GIB,
    1.5e12,
    {"bf16": 300e12, "fp16": 300e12, "fp32": 20e12, "fp8": None},
    "8.0",
    "made up",
)
SLOW = GpuType(
    "SLOW",
    16 * GIB,
    0.6e12,
    {"bf16": 100e12, "fp16": 100e12, "fp32": 10e12, "fp8": None},
    "8.6",
    "made up",
)
OLD = GpuType(
    "OLD",
    16 * GIB,
    0.9e12,
    {"bf16": None, "fp16": 125e12, "fp32": 15e12, "fp8": None},
    "7.0",
    "made up",
)
INSIDE = Link(100e9, 3e-6)
BETWEEN = Link(3e9, 2e-5)
AS_GIVEN = Limits(memory_reserve_bytes=0, as_given=CHOICES)
FREE = Limits(memory_reserve_bytes=0)


def make_cluster(
    *nodes: tuple[str, GpuType, int],
    between: Link = BETWEEN,
    inside: Link = INSIDE,
    limits: Limits | None = None,
    sites: Sequence[str] | None = None,
) -> Cluster:
    """Nodes as (name, type, number of GPUs); any two are joined by `between`.

    By default plans do all as the job's flags say (`Limits.as_given`).
    """
    site_of = sites or ["main"] * len(nodes)
    made = tuple(
        Node(name, gpu, count, site, f"host-{name}", inside)
        for (name, gpu, count), site in zip(nodes, site_of, strict=True)
    )
    links = {(a.name, b.name): between for a in made for b in made if a.name != b.name}
    return Cluster(made, links, limits or AS_GIVEN)


def without_lines(cluster: Cluster) -> Cluster:
    """As with `shared: none`: each two nodes have the bandwidth between their sites."""
    return replace(cluster, site_lines={})


def make_workload(
    num_layers: int = 4,
    hidden_size: int = 512,
    global_batch_size: int = 4,
    micro_batch_size: int = 1,
    **changes: object,
) -> Workload:
    """A small GPT; `changes` go to ModelSpec or TrainingSpec by name."""
    model = ModelSpec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=hidden_size // 8,
        vocab_size=1000,
        seq_length=256,
        max_position_embeddings=256,
    )
    training = TrainingSpec(global_batch_size, micro_batch_size, "bf16")
    for name, value in changes.items():
        if hasattr(model, name):
            model = replace(model, **{name: value})  # type: ignore[arg-type]
        else:
            training = replace(training, **{name: value})  # type: ignore[arg-type]
    return Workload(model, training, (), "test")


CLUSTER = make_cluster(("a", FAST, 2), ("b", SLOW, 2))


def place(layout: str, workload: Workload | None, cluster: Cluster = CLUSTER) -> Plan:
    """A plan from a layout, its ranks on the cluster's devices in order."""
    return place_plan(plan_from_layout(parse_layout(layout), workload), cluster)


def place_plan(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with its ranks on the cluster's devices in order."""
    names = iter([device.name for device in cluster.devices])
    replicas = tuple(
        replace(
            r,
            stages=tuple(
                replace(s, devices=tuple(next(names) for _ in range(s.shape.num_devices)))
                for s in r.stages
            ),
        )
        for r in plan.replicas
    )
    return replace(plan, replicas=replicas)


def estimate_plan(plan: Plan, cluster: Cluster) -> Estimates:
    """A plan as the cost model alone prices it: no queues, and no waiting of stock Megatron."""
    costs, placement = CostModel(cluster, workload_of(plan)), placement_of(plan, cluster)
    return estimates_of(costs, placement, costs.placement(placement))


def bytes_between_nodes(
    costs: CostModel, placement: Placement, cost: PlacementCost
) -> dict[tuple[str, str], float]:
    """Sum the bytes of a step on each path between two nodes, boundaries and gradients."""
    found: dict[tuple[str, str], float] = {}
    for _, pair, num_bytes in costs.traffic(placement, cost):
        found[pair] = found.get(pair, 0.0) + num_bytes
    return found
