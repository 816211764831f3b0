"""Plans that break one invariant each, and the words in which they are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_hetero.cluster.spec import Cluster, Limits
from megatron_hetero.plan.build import plan_from_layout, replica_from_shape
from megatron_hetero.plan.checks import cluster as check_cluster
from megatron_hetero.plan.checks import devices as check_devices
from megatron_hetero.plan.checks import estimates as check_estimates
from megatron_hetero.plan.checks import schedule as check_schedule
from megatron_hetero.plan.checks import sharding as check_sharding
from megatron_hetero.plan.checks import structure as check_structure
from megatron_hetero.plan.checks import workload as check_workload
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import (
    DeviceEstimate,
    LayerRange,
    Layout,
    Plan,
)
from tests.cost.builders import make_workload
from tests.plan.edits import (
    CLUSTER,
    PLAN,
    with_estimates,
    with_host,
    with_model,
    with_replica,
    with_shape,
    with_stage,
    with_training,
)
from tests.plan.strategies import (
    GIB,
    RTX_4090,
    cluster_of,
    node,
)


def with_chunks(plan: Plan, *chunks: tuple[int, int]) -> Plan:
    """The plan with chunks (first layer, layers) on stage 0 of replica 0."""
    return with_stage(plan, 0, 0, chunks=tuple(LayerRange(*chunk) for chunk in chunks))


def with_orders(order: str) -> Plan:
    """The plan with one order on both stages of replica 0."""
    return with_stage(with_stage(PLAN, 0, 0, order=order), 0, 1, order=order)


def _named_flags(plan: Plan) -> Plan:
    """Give the plan's job flags, by which its layers are Megatron's default ones."""
    assert plan.workload is not None
    return replace(plan, workload=replace(plan.workload, megatron_args=("--swiglu",)))


def with_table(plan: Plan, table: tuple[int, ...]) -> Plan:
    """Replica 0's first stage deals its experts out."""
    return with_shape(plan, 0, 0, expert_shares=table)


def _with_context(plan: Plan, size: int, shares: tuple[int, ...] | None = None) -> Plan:
    """The plan without devices and fused attention, its first stage on `size` tensor-parallel
    groups."""
    bare = tuple(
        replace(r, stages=tuple(replace(s, devices=()) for s in r.stages)) for r in plan.replicas
    )
    plan = replace(plan, replicas=bare, hosts=(), idle_devices=(), idle_reasons={}, estimates=None)
    plan = with_training(plan, flash_attention=shares is None)
    return with_shape(plan, 0, 0, context_parallel=size, context_shares=shares)


def _unchecked(text: str) -> Plan:
    """The plan of a layout, unchecked."""
    return Plan(tuple(replica_from_shape(shape) for shape in parse_layout(text).replicas))


def _sharded(text: str) -> Plan:
    """The plan of a layout with sharded layers, unchecked."""
    shapes = parse_layout(text).replicas
    bare = [
        replace(r, stages=tuple(replace(s, num_sharded_layers=0) for s in r.stages)) for r in shapes
    ]
    plan = plan_from_layout(Layout(tuple(bare)))
    for r, shape in enumerate(shapes):
        for s, stage in enumerate(shape.stages):
            plan = with_shape(plan, r, s, num_sharded_layers=stage.num_sharded_layers)
    return plan


BROKEN: dict[Callable[..., Any], list[tuple[Plan, str]]] = {
    check_structure.known_schema_version: [
        (replace(PLAN, schema_version=2), "schema_version is 2; .* reads 1"),
    ],
    check_structure.something_to_run: [
        (Plan(()), "the plan has no replica"),
        (with_replica(PLAN, 1, stages=()), "replica 1 has no stage"),
    ],
    check_structure.numbers_in_bounds: [
        (with_replica(PLAN, 1, num_micro_batches=0), "replica 1: num_micro_batches is 0; allowed"),
        (with_replica(PLAN, 0, micro_batch_size=0), "replica 0: micro_batch_size is 0"),
        (
            with_shape(PLAN, 0, 1, tensor_parallel=2000),
            "replica 0, stage 1: tensor_parallel is 2000; allowed is 1 to 1024",
        ),
        (with_shape(PLAN, 0, 1, num_layers=-1), "replica 0, stage 1: num_layers is -1"),
    ],
    check_structure.expert_groups_are_two_sizes: [
        *(
            (
                with_shape(PLAN, 0, 0, expert_groups=sizes),
                f"replica 0, stage 0: expert_groups has {len(sizes)} numbers; give two",
            )
            for sizes in ((), (2,), (1, 2, 3))
        ),
        (with_shape(PLAN, 0, 0, expert_groups=(0, 1)), "expert-parallel size 0; .* 1 to 65536"),
        # Without a workload no later invariant sees the two cancel out.
        (
            with_shape(replace(PLAN, workload=None), 0, 0, expert_groups=(-1, -1)),
            "expert_groups has the expert-parallel size -1",
        ),
        (
            with_shape(PLAN, 0, 0, expert_groups=(1, 1025)),
            "expert-tensor-parallel size 1025; allowed is 1 to 1024",
        ),
    ],
    check_structure.shares_fit_widths: [
        (
            with_shape(PLAN, 0, 0, shares=(2, 1)),
            "replica 0, stage 0: 2 shares for tensor-parallel width 4",
        ),
        (with_shape(PLAN, 0, 0, shares=(2, 1, 1, 0)), "share 0; allowed is 1 to 1024"),
    ],
    check_structure.layers_follow_each_other: [
        (
            with_shape(PLAN, 0, 0, num_layers=3),
            "replica 0, stage 1 begins at layer 5, but layer 3 is due: "
            "replica 0 would have layers 3, 4 on no stage. Set first_layer to 3",
        ),
        (with_shape(PLAN, 0, 0, num_layers=6), "would have layer 5 on two stages"),
        (with_stage(PLAN, 1, 0, first_layer=1), "replica 1 would have layer 0 on no stage"),
    ],
    check_structure.replicas_hold_every_layer: [
        (
            with_shape(PLAN, 1, 0, num_layers=6),
            "replica 1 covers layers 0-5 of 8; layers 6, 7 are on no stage",
        ),
        (
            with_shape(PLAN, 0, 1, num_layers=4),
            r"replica 0 covers layers 0-8, but the model has 8 \(0-7\)",
        ),
        (
            with_shape(replace(PLAN, workload=None), 0, 1, num_layers=2),
            "replica 0 covers layers 0-6 of 8; layer 7 is on no stage. .* of replica 1",
        ),
    ],
    check_schedule.chunks_are_the_stages_layers: [
        (with_chunks(PLAN, (0, 2), (5, 2)), "its chunks have 4 layers, its shape 5"),
        (with_chunks(PLAN, (0, 5), (5, 0)), "a model chunk has 0 layers"),
        (with_chunks(PLAN, (5, 2), (0, 3)), "begin at layers 5, 0; they must ascend from .* 0"),
    ],
    check_schedule.chunks_follow_each_other: [
        (
            with_chunks(PLAN, (0, 2), (6, 3)),
            "stage 1: .* begins at layer 5, but layer 2 is due",
        ),
        (with_chunks(PLAN, (0, 2), (2, 3)), "replica 0, stage 0: two of its model chunks follow"),
        (
            with_stage(with_chunks(PLAN, (0, 2), (5, 3)), 0, 1, first_layer=2),
            "the last on stage 0; .* the loss on stage 1",
        ),
    ],
    check_schedule.orders_are_complete: [
        (
            with_stage(PLAN, 0, 0, order="F" * 12 + "B" * 12),
            "stage 1 has no order, but other",
        ),
        (with_orders("F" * 11 + "B" * 12), r"stage 0: order: has backward pass 11 before its for"),
        (with_orders("F" * 11 + "B" * 11), "has 11 F; the replica has 12 micro-batches"),
        (with_orders("F" * 12 + "B" * 6 + "X"), "'X' at character 19; expected is F, B, I or W"),
        (with_orders("F1" * 12), "names model chunk 1; the stage has 1"),
        (with_orders("F" * 12 + "I" * 6 + "B" * 6), "has B and I; a chunk's backward passes"),
        (with_orders("F" * 12 + "WI"), "has W 0 before its I"),
        (with_orders("F" * 12 + "I" * 12 + "W" * 11), "has 11 W; the replica has 12"),
        (replace(PLAN, schedule="zero-bubble"), "schedule is 'zero-bubble', but no stage has an"),
    ],
    check_schedule.launch_counts_feed_the_pipeline: [
        (
            with_stage(with_orders("F" * 12 + "B" * 12), 0, 0, num_launched_forwards=12),
            "has num_launched_forwards and an order, which says it already",
        ),
        (
            with_stage(PLAN, 1, 0, num_launched_forwards=5),
            "replica 1, stage 0: num_launched_forwards is 5; allowed is 1 to .* 4 micro-batches",
        ),
        (with_stage(PLAN, 0, 0, num_launched_forwards=0), "num_launched_forwards is 0"),
        (
            with_stage(PLAN, 0, 1, num_launched_forwards=3),
            "is 3, more than the 2 of stage 0, and the pipeline would deadlock",
        ),
    ],
    check_structure.recompute_is_complete: [
        (
            with_stage(PLAN, 0, 0, recompute="selective", recompute_num_layers=1),
            "recompute_num_layers is 1, but recompute is 'selective'",
        ),
        (
            with_stage(PLAN, 0, 0, recompute="full", recompute_num_layers=6),
            "recompute_num_layers is 6; allowed is 1 to the stage's 5 layers",
        ),
    ],
    check_estimates.estimates_have_the_plans_shape: [
        (with_estimates(PLAN, replica_times_s=(1.0,)), "replica_times_s has 1 entries, .* needs 2"),
        (with_estimates(PLAN, stage_times_s=((1.0,), (1.0,))), r"stage_times_s has \[1, 1\]"),
        (with_estimates(PLAN, boundary_times_s=((), ())), "boundary_times_s"),
        (
            with_estimates(PLAN, devices={"a:9": DeviceEstimate(2, 1, {})}),
            "names a:9, which is in no stage",
        ),
    ],
    check_estimates.estimates_are_possible: [
        (with_estimates(PLAN, price_per_hour=-1.0), r"price_per_hour holds -1\.0"),
        (with_estimates(PLAN, step_time_s=float("nan")), "estimates.step_time_s holds nan"),
        (with_estimates(PLAN, tokens_per_s=-1.0), "estimates.tokens_per_s holds -1.0"),
        (with_estimates(PLAN, bound_s=2.1), "bound_s is 2.1, above step_time_s 2.0"),
        (
            with_estimates(PLAN, devices={"a:0": DeviceEstimate(10, 13, {})}),
            "a:0 needs 13 B at its peak and has 10 B: 3 B too much",
        ),
    ],
    check_devices.devices_everywhere_or_nowhere: [
        (with_stage(PLAN, 0, 1, devices=()), "replica 0, stage 1 names no devices"),
        (replace(PLAN, hosts=()), "stages name devices, but the plan has no hosts"),
    ],
    check_devices.as_many_devices_as_ranks: [
        (
            with_stage(PLAN, 0, 0, devices=("a:0", "a:1", "a:2")),
            "replica 0, stage 0 names 3 devices for tensor-parallel width 4",
        ),
    ],
    check_devices.each_device_in_one_place: [
        (
            with_stage(PLAN, 1, 0, devices=("b:0",)),
            "device b:0 is in replica 1, stage 0 and in replica 0, stage 1",
        ),
        (replace(PLAN, idle_devices=("b:2",)), "device b:2 is idle and in replica 1, stage 0"),
        (replace(PLAN, idle_devices=("b:1", "b:1")), "device b:1 is listed 2 times"),
        (replace(PLAN, idle_devices=()), "idle_reasons explains b:1"),
    ],
    check_devices.hosts_are_sound: [
        (with_host(PLAN, 0, host="-oProxyCommand=x"), "'-oProxyCommand=x' .* not a host name"),
        (with_host(PLAN, 0, host="a b"), "not a host name"),
        (with_host(PLAN, 0, host="a\n"), "not a host name"),
        (with_host(PLAN, 1, node="a"), "machine a is listed twice"),
        (with_host(PLAN, 1, gpu_indices=()), "machine b gives no GPU"),
        (with_host(PLAN, 1, gpu_indices=(0, 2, 2)), "GPU index 2 of machine b is listed twice"),
        (with_host(PLAN, 1, gpu_indices=(-1, 2)), "GPU index -1 of machine b is negative"),
    ],
    check_devices.hosts_say_their_library: [
        (
            with_host(PLAN, 1, gpu_type="MY-CARD"),
            "machine b has MY-CARD, .* name shows no maker, and the plan does not say its",
        ),
    ],
    check_devices.hosts_speak_one_library: [
        (
            with_host(PLAN, 0, gpu_type="MI300X"),
            r"libraries are mixed: RCCL of AMD on a \(MI300X\)",
        ),
        (with_host(PLAN, 1, library="RCCL"), r"and RCCL of AMD on b \(RTX-4090\)"),
        (
            with_host(PLAN, 1, gpu_type="Gaudi-2"),
            r"node b cannot be in a job: Gaudi-2 \(library: HCCL\) is",
        ),
    ],
    check_devices.hosts_hold_exactly_the_devices: [
        (with_host(PLAN, 1, gpu_indices=(2,)), "device b:0 of replica 0, stage 1 is on no host"),
        (with_host(PLAN, 1, gpu_indices=(0, 3, 2)), "starts a process for GPU 3, which is in no"),
    ],
    check_devices.stages_are_in_rank_order: [
        (
            with_host(PLAN, 0, gpu_indices=(1, 0, 2, 3)),
            "a:0, a:1, a:2, a:3 are not in rank order; .* it is a:1, a:0, a:2, a:3",
        ),
    ],
    check_devices.last_rank_is_the_last_place: [
        (
            with_host(PLAN, 1, gpu_indices=(2, 0)),
            "the last global rank is b:0, but .* last replica, b:2",
        ),
        (replace(PLAN, hosts=PLAN.hosts[::-1]), "the last global rank is a:3"),
    ],
    check_workload.expert_groups_fit: [
        (
            _unchecked("tp2ep3:4 @1 | tp2ep3:4 @1 | tp2ep3:4 @1"),
            "ep3etp1 makes groups of 3 ranks, and the stage has 2",
        ),
    ],
    check_workload.experts_over_replicas_meet: [
        (_unchecked("tp1ep2:4 @1 | tp1ep2:4 @2"), r"stage 0 \(tp1ep2:4\) deals .* over 2 replicas"),
        (_unchecked("tp1ep2:2,tp1:2 @1 | tp1ep2:3,tp1:1 @1"), "only 1 with an equal stage 0 is"),
    ],
    check_workload.experts_can_be_dealt_out: [
        (
            with_table(with_model(PLAN, num_experts=6, moe_ffn_hidden_size=192), (1, 1, 1, 1)),
            r"ep4 does not divide 6 experts .* as in ep4\(2:2:2:1\)",
        ),
        (
            with_table(with_model(PLAN, num_experts=2, moe_ffn_hidden_size=192), (2, 1, 1, 1)),
            "each of 4 devices an expert, and the model has 2 experts",
        ),
        (with_table(PLAN, (1, 1, 1, 1)), "the model has no experts"),
    ],
    check_devices.exchange_groups_are_of_the_hosts: [
        (replace(PLAN, exchange_groups=(("a", "b"),)), "one group, which is none"),
        (replace(PLAN, exchange_groups=(("a",), ("b",), ())), r"\[2\] names no machine"),
        (replace(PLAN, exchange_groups=(("a",), ("b", "z"))), "names z, which is no machine"),
        (replace(PLAN, exchange_groups=(("a",), ("b", "a"))), "a is in exchange_groups"),
        (replace(PLAN, exchange_groups=(("a",), ("a",))), "b is in none of the exchange_groups"),
        (
            replace(_with_context(PLAN, 1), exchange_groups=(("a",), ("b",))),
            "the plan has no hosts",
        ),
    ],
    check_devices.exchange_uplinks_are_of_the_groups: [
        (
            replace(PLAN, exchange_uplinks=((1,), (2,))),
            r"has 2 lists, and exchange_groups 0. Give a list for each group, or leave",
        ),
        (
            replace(PLAN, exchange_groups=(("a",), ("b",)), exchange_uplinks=((1,), (2, 3))),
            r"\[1\] has 2 numbers, and exchange_groups\[1\] 1 machines",
        ),
        (
            replace(PLAN, exchange_groups=(("a",), ("b",)), exchange_uplinks=((1,), (0,))),
            r"\[1\] gives b 0; a relative bandwidth is a whole number of 1 or more",
        ),
    ],
    check_workload.widths_divide_the_model: [
        (
            with_model(PLAN, num_attention_heads=6, num_query_groups=6),
            "replica 0, stage 0: tensor-parallel width 4 does not divide the model's 6 attention "
            r"heads \(--num-attention-heads\). .* shares, as in tp4\(2:2:2:1\)",
        ),
        (with_model(PLAN, num_query_groups=3), "4 does not divide the model's 3 query groups"),
        (with_model(PLAN, ffn_hidden_size=190), "190 MLP columns"),
        (
            with_model(PLAN, num_experts=2, moe_ffn_hidden_size=90),
            r"90 columns of an expert \(--moe-ffn-hidden-size\)",
        ),
        (
            with_shape(with_model(PLAN, num_query_groups=3), 0, 0, shares=(2, 1, 1, 1)),
            "3 query groups .* cannot give each of 4 devices one",
        ),
    ],
    check_sharding.sharded_layers_are_the_stages_own: [
        (with_shape(PLAN, 0, 0, num_sharded_layers=99), "num_sharded_layers is 99; allowed is 0"),
        (with_shape(PLAN, 0, 0, num_sharded_layers=-1), "num_sharded_layers is -1; allowed is 0"),
    ],
    check_sharding.sharded_layers_have_holders: [
        (_sharded("tp1:4z2 @2"), "no other replica to keep"),
        (
            _sharded("tp1:4z2 @2 | tp1:4z1 @2"),
            "replica 1 has stages of 4z1 layers, replica 0 of 4z2",
        ),
        (
            _sharded("tp1:4z2 @2 | tp1:3z2,tp1:1 @2"),
            "replica 1 has stages of 3z2, 1 layers, replica 0 of 4z2",
        ),
        (
            _sharded("tp1cp2:4z2 @2 | tp1:4z2 @2"),
            r"context parallelism \(cp\) and sharded layers \(z\) do not go together",
        ),
    ],
    check_sharding.sharded_layers_are_passed_alike: [
        (
            _sharded("tp1:2z2,tp1:2 @2 | tp1:2z2,tp1:2 @3"),
            "replica 1 has 3 micro-batches, replica 0 2",
        ),
        (
            with_stage(
                _sharded("tp1:2z2,tp1:2 @4 | tp1:2z2,tp1:2 @4"),
                1,
                0,
                num_launched_forwards=3,
            ),
            "replica 1 has other launch counts than replica 0",
        ),
        (
            replace(
                _sharded("tp1:4z2 @2 | tp1:4z2 @2"),
                exchange_groups=(("a",), ("b",)),
            ),
            "exchange_groups and sharded layers",
        ),
        (
            with_stage(_sharded("tp1:4z2 @2 | tp1:4z2 @2"), 1, 0, order="FFBB"),
            "an order of its own and sharded layers",
        ),
    ],
    check_sharding.sharded_layers_fit_the_training: [
        (
            replace(
                _sharded("tp1:4z2 @2 | tp1:4z2 @2"),
                workload=make_workload(4, 512),
            ),
            "has no --use-distributed-optimizer",
        ),
        (
            replace(
                _sharded("tp1:4z2 @2 | tp1:4z2 @2"),
                workload=make_workload(
                    4, 512, use_distributed_optimizer=True, num_experts=4, moe_router_topk=2
                ),
            ),
            "sharded layers .* and experts",
        ),
    ],
    check_workload.context_parallel_divides: [
        (
            with_model(_with_context(PLAN, 2), seq_length=22),
            "context-parallel size 2 needs a --seq-length that is a multiple of 4, not 22",
        ),
        (
            with_model(_with_context(PLAN, 2, (3, 1)), seq_length=23),
            "2 groups need a --seq-length that is even and at least 4, not 23",
        ),
    ],
    check_workload.unlike_sequence_shares_are_gathered: [
        (
            with_training(_with_context(PLAN, 2, (3, 1)), flash_attention=True),
            "Transformer Engine divides sequences equally. Add --transformer-impl local",
        ),
    ],
    check_workload.split_passes_are_of_local_layers: [
        (
            _named_flags(with_training(with_orders("FIW" * 12), flash_attention=True)),
            "splits backward passes .* --transformer-impl local",
        ),
    ],
    check_workload.sequence_parallel_divides: [
        (
            with_model(
                _with_context(with_training(PLAN, sequence_parallel=True), 2), seq_length=36
            ),
            "the width 4 must divide the 18 tokens of a context-parallel rank",
        ),
        (
            with_model(
                _with_context(with_training(PLAN, sequence_parallel=True), 2, (3, 1)),
                seq_length=22,
            ),
            "the tokens of every context-parallel rank, which are 16, 6 of --seq-length 22. Make "
            "it a multiple of 4 and at least 8",
        ),
        (
            with_model(with_training(PLAN, sequence_parallel=True), seq_length=22),
            "the width 4 must divide --seq-length 22",
        ),
    ],
    check_workload.micro_batches_make_the_global_batch: [
        (
            with_replica(PLAN, 1, num_micro_batches=5),
            r"make 12\*1 \+ 5\*1 = 17 sequences, but --global-batch-size is 16",
        ),
    ],
    check_workload.unlike_sizes_are_weighted_by_token: [
        (
            with_replica(PLAN, 1, num_micro_batches=2, micro_batch_size=2),
            "replica 1 has micro-batch size 2, replica 0 has 1: .* --calculate-per-token-loss",
        ),
    ],
}


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
