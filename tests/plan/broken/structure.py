"""Plans whose shape, schedule or estimates break one invariant each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_hetero.plan.checks import estimates as check_estimates
from megatron_hetero.plan.checks import schedule as check_schedule
from megatron_hetero.plan.checks import structure as check_structure
from megatron_hetero.plan.estimates import DeviceEstimate
from megatron_hetero.plan.plan import LayerRange, Plan
from tests.plan.edits import (
    PLAN,
    with_estimates,
    with_model,
    with_orders,
    with_replica,
    with_shape,
    with_stage,
    with_training,
)


def with_chunks(plan: Plan, *chunks: tuple[int, int]) -> Plan:
    """The plan with chunks (first layer, layers) on stage 0 of replica 0."""
    return with_stage(plan, 0, 0, chunks=tuple(LayerRange(*chunk) for chunk in chunks))


BROKEN: dict[Callable[..., Any], list[tuple[Plan, str]]] = {
    check_structure.known_schema_version: [
        (replace(PLAN, schema_version=2), "schema_version is 2; .* reads 1"),
    ],
    check_structure.sizes_are_positive: [
        (with_model(PLAN, hidden_size=0), "hidden_size of the job is 0; it is at least 1"),
        (with_model(PLAN, make_vocab_size_divisible_by=0), "divisible_by of the job is 0"),
        (with_model(PLAN, num_experts=-1), "num_experts of the job is -1; it is at least 0"),
        (with_training(PLAN, micro_batch_size=0), "micro_batch_size of the job is 0"),
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
}
