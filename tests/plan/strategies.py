"""Random layouts, clusters and valid plans for property tests of plans and flags."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.build import canonical_hosts, in_rank_order, replica_from_shape
from megatron_hetero.plan.estimates import DeviceEstimate, Estimates
from megatron_hetero.plan.plan import Layout, Plan, Replica, ReplicaShape, StageShape

GIB = 2**30
LINK = Link(1e9, 1e-5)
A100 = GpuType("A100-40GB", 40 * GIB, 1.5e12, {"bf16": 312e12}, "8.0", "test")
RTX_4090 = GpuType("RTX-4090", 24 * GIB, 1.0e12, {"bf16": 165e12}, "8.9", "test")

MODEL = ModelSpec(
    num_layers=8,
    hidden_size=48,
    ffn_hidden_size=192,
    num_attention_heads=12,
    num_query_groups=12,
    kv_channels=4,
    vocab_size=100,
    seq_length=24,
    max_position_embeddings=24,
)


def workload(global_batch_size: int = 16, **changes: object) -> Workload:
    """MODEL with the flags it would have been read from; `changes` are of TrainingSpec."""
    training = replace(TrainingSpec(global_batch_size, 1), **changes)  # type: ignore[arg-type]
    args = (
        *("--num-layers", str(MODEL.num_layers)),
        *("--hidden-size", str(MODEL.hidden_size)),
        *("--num-attention-heads", str(MODEL.num_attention_heads)),
        *("--seq-length", str(MODEL.seq_length)),
        *("--max-position-embeddings", str(MODEL.max_position_embeddings)),
        *("--micro-batch-size", str(training.micro_batch_size)),
        *("--global-batch-size", str(global_batch_size)),
        *("--lr", "1e-4"),
    )
    return Workload(MODEL, training, args, "test")


def cluster_of(*nodes: Node) -> Cluster:
    links = {(a.name, b.name): LINK for a in nodes for b in nodes if a is not b}
    return Cluster(nodes, links)


def node(name: str, num_gpus: int, gpu_type: GpuType = A100, site: str = "main") -> Node:
    return Node(name, gpu_type, num_gpus, site, f"{name}.example", LINK)


@st.composite
def stage_shapes(draw: st.DrawFn) -> StageShape:
    width = draw(st.integers(1, 6))
    shares = draw(st.none() | st.tuples(*[st.integers(1, 9)] * width))
    context = draw(st.integers(1, 3))
    of_sequences = draw(st.none() | st.tuples(*[st.integers(1, 9)] * context))
    layers = draw(st.integers(1, 100))
    return StageShape(width, layers, shares, context, context_shares=of_sequences)


layouts = st.builds(
    Layout,
    st.lists(
        st.builds(
            ReplicaShape,
            st.lists(stage_shapes(), min_size=1, max_size=5).map(tuple),
            st.integers(1, 512),
            st.none() | st.integers(1, 64),
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
)


@st.composite
def split(draw: st.DrawFn, total: int, parts: int) -> tuple[int, ...]:
    """`total` as `parts` positive numbers."""
    cuts = sorted(draw(st.permutations(range(1, total)))[: parts - 1])
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


@st.composite
def replica_shapes(draw: st.DrawFn, num_micro_batches: int) -> ReplicaShape:
    """A replica of MODEL; widths divide its heads and columns."""
    counts = draw(split(MODEL.num_layers, draw(st.integers(1, 4))))
    return ReplicaShape(
        tuple(StageShape(draw(st.sampled_from([1, 2, 3, 4])), count) for count in counts),
        num_micro_batches,
    )


@st.composite
def placed_plans(draw: st.DrawFn) -> tuple[Plan, Cluster]:
    """A valid plan with devices, idle ones too, and the cluster it is for."""
    num_replicas = draw(st.integers(1, 3))
    shapes = [draw(replica_shapes(n)) for n in draw(split(16, num_replicas))]
    num_devices = sum(shape.num_devices for shape in shapes)
    num_idle = draw(st.integers(0, 2))
    node_sizes = []
    while sum(node_sizes) < num_devices + num_idle:
        node_sizes.append(draw(st.integers(1, 6)))
    cluster = cluster_of(
        *(
            node(f"n{i}", size, draw(st.sampled_from([A100, RTX_4090])))
            for i, size in enumerate(node_sizes)
        )
    )
    devices = draw(st.permutations([device.name for device in cluster.devices]))
    replicas = place(shapes, devices[:num_devices])
    hosts = canonical_hosts(replicas, cluster)
    plan = Plan(
        in_rank_order(replicas, hosts),
        workload=workload(),
        hosts=hosts,
        idle_devices=tuple(sorted(devices[num_devices:])),
        inputs={"cluster": "c" * 64, "model": "m" * 64},
        made_by="test",
    )
    limits = replace(cluster.limits, no_tensor_parallel_across=())
    return replace(plan, estimates=draw(estimates(plan))), replace(cluster, limits=limits)


def place(shapes: list[ReplicaShape], devices: list[str]) -> tuple[Replica, ...]:
    """Replicas of these shapes on these devices, in reading order."""
    free = iter(devices)
    replicas = []
    for shape in shapes:
        bare = replica_from_shape(shape)
        stages = tuple(
            replace(s, devices=tuple(next(free) for _ in range(s.shape.num_devices)))
            for s in bare.stages
        )
        replicas.append(replace(bare, stages=stages))
    return tuple(replicas)


@st.composite
def estimates(draw: st.DrawFn, plan: Plan) -> Estimates:
    step_time_s = draw(st.floats(1e-3, 1e3))
    bound_s = draw(st.none() | st.floats(1e-4, step_time_s))
    return Estimates(
        step_time_s=step_time_s,
        tokens_per_s=1e3 / step_time_s,
        bound_s=bound_s,
        gap=None if bound_s is None else step_time_s / bound_s - 1,
        replica_times_s=(step_time_s,) * len(plan.replicas),
        stage_times_s=tuple((0.25,) * len(r.stages) for r in plan.replicas),
        boundary_times_s=tuple((0.5,) * (len(r.stages) - 1) for r in plan.replicas),
        gradient_sync_s=draw(st.sampled_from([0.0, 0.125])),
        devices={
            device: DeviceEstimate(24 * GIB, 8 * GIB, {"weights": 6 * GIB, "reserve": 2 * GIB})
            for r in plan.replicas
            for s in r.stages
            for device in s.devices
        },
    )
