"""Plans that break one invariant of the model, its training or sharded layers each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_hetero.plan.build import plan_from_layout, replica_from_shape
from megatron_hetero.plan.checks import sharding as check_sharding
from megatron_hetero.plan.checks import workload as check_workload
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import (
    Layout,
    Plan,
)
from tests.cost.builders import make_workload
from tests.plan.edits import (
    PLAN,
    with_context,
    with_model,
    with_orders,
    with_replica,
    with_shape,
    with_stage,
    with_training,
)


def _named_flags(plan: Plan) -> Plan:
    """Give the plan's job flags, by which its layers are Megatron's default ones."""
    assert plan.workload is not None
    return replace(plan, workload=replace(plan.workload, megatron_args=("--swiglu",)))


def with_table(plan: Plan, table: tuple[int, ...]) -> Plan:
    """Replica 0's first stage deals its experts out."""
    return with_shape(plan, 0, 0, expert_shares=table)


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
            with_model(with_context(PLAN, 2), seq_length=22),
            "context-parallel size 2 needs a --seq-length that is a multiple of 4, not 22",
        ),
        (
            with_model(with_context(PLAN, 2, (3, 1)), seq_length=23),
            "2 groups need a --seq-length that is even and at least 4, not 23",
        ),
    ],
    check_workload.unlike_sequence_shares_are_gathered: [
        (
            with_training(with_context(PLAN, 2, (3, 1)), flash_attention=True),
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
                with_context(with_training(PLAN, sequence_parallel=True), 2), seq_length=36
            ),
            "the width 4 must divide the 18 tokens of a context-parallel rank",
        ),
        (
            with_model(
                with_context(with_training(PLAN, sequence_parallel=True), 2, (3, 1)),
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
