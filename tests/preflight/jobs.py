"""Plans made by the planner for clusters of catalogue GPUs, to look at and to break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_and_explain
from tests.cost.builders import make_cluster, make_workload

COMPLETE = (
    "--train-iters=9", "--lr=1e-4", "--mock-data", "--tokenizer-type=NullTokenizer",
    "--eval-interval=9",
)  # fmt: skip
MIXED_NCCL = ("NCCL_ALGO=Ring", "NCCL_PROTO=Simple")


@cache
def planned(
    *nodes: tuple[str, str, int],
    precision: str = "bf16",
    sites: tuple[str, ...] | None = None,
    num_layers: int = 8,
) -> tuple[Plan, Cluster]:
    """The planner's own plan on nodes given as (name, GPU of the catalogue, count)."""
    cluster = make_cluster(
        *((name, gpu_type(gpu), count) for name, gpu, count in nodes),
        sites=sites,
    )
    workload = make_workload(
        num_layers=num_layers, global_batch_size=16, hidden_size=1024, precision=precision
    )
    plan, _ = plan_and_explain(cluster, workload)
    return plan, cluster


def with_flags(plan: Plan, *flags: str) -> Plan:
    """The plan of a user who trains with these Megatron flags, beside those of every job."""
    assert plan.workload is not None
    return replace(plan, workload=replace(plan.workload, megatron_args=(*COMPLETE, *flags)))


def with_host(plan: Plan, cluster: Cluster, node: str, host: str) -> tuple[Plan, Cluster]:
    """The node on another host, in both files."""
    hosts = tuple(replace(h, host=host) if h.node == node else h for h in plan.hosts)
    nodes = tuple(replace(n, host=host) if n.name == node else n for n in cluster.nodes)
    return replace(plan, hosts=hosts), replace(cluster, nodes=nodes)


def with_width(nodes: Sequence[tuple[str, str, int]], layout: str) -> tuple[Plan, Cluster]:
    """A plan typed as a layout, on the GPUs of the nodes in order."""
    from megatron_hetero.plan.build import canonical_hosts, in_rank_order, plan_from_layout
    from megatron_hetero.plan.layout import parse_layout
    from tests.plan.strategies import place

    cluster = make_cluster(*((name, gpu_type(gpu), count) for name, gpu, count in nodes))
    parsed = parse_layout(layout)
    first = parsed.replicas[0]
    batch = sum(r.num_micro_batches * (r.micro_batch_size or 1) for r in parsed.replicas)
    workload = make_workload(first.num_layers, hidden_size=1024, global_batch_size=batch)
    replicas = place(list(parsed.replicas), [d.name for d in cluster.devices])
    hosts = canonical_hosts(replicas, cluster)
    plan = plan_from_layout(parsed, workload)
    return replace(plan, replicas=in_rank_order(replicas, hosts), hosts=hosts), cluster
