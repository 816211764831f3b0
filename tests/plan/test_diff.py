"""Differences between plans, as sentences."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.diff import Difference, diff_plans
from megatron_hetero.plan.estimates import DeviceEstimate
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tests.plan.edits import (
    PLAN,
    with_estimates,
    with_replica,
    with_stage,
    with_training,
)
from tests.plan.strategies import placed_plans, workload


def lines(before: Plan, after: Plan) -> list[str]:
    return [str(difference) for difference in diff_plans(before, after)]


def layout_lines(before: str, after: str) -> list[str]:
    return lines(*(plan_from_layout(parse_layout(text)) for text in (before, after)))


@settings(max_examples=25)
@given(placed_plans())
def test_a_plan_does_not_differ_from_itself(planned: tuple[Plan, Cluster]) -> None:
    assert diff_plans(planned[0], planned[0]) == ()


def test_layers_move_between_stages() -> None:
    assert layout_lines("tp4:20,tp2:12 @8", "tp4:22,tp2:10 @8") == [
        "replica 0, stage 0: holds layers 0-19 -> layers 0-21",
        "replica 0, stage 1: holds layers 20-31 -> layers 22-31",
    ]


def test_widths_shares_and_batches() -> None:
    assert layout_lines("tp4:32 @8", "tp2(2:1):32 @4x2") == [
        "replica 0: micro-batches 8 -> 4",
        "replica 0: micro-batch size the job's -> 2",
        "replica 0, stage 0: tensor-parallel width 4 -> 2",
        "replica 0, stage 0: shares equal -> 2:1",
    ]


def test_experts_dealt_out_are_not_experts_divided() -> None:
    assert layout_lines("tp2ep2:4 @4", "tp2:4 @4") == [
        "replica 0, stage 0: experts ep(1:1) -> divided"
    ]
    assert layout_lines("tp2:4 @4", "tp2ep2etp1:4 @4") == [
        "replica 0, stage 0: experts divided -> ep2etp1"
    ]


def test_replicas_and_stages_come_and_go() -> None:
    assert layout_lines("tp1:4 @8", "tp1:4 @8 | tp1:1,tp1:3 @8") == [
        "replica 1: replica added: tp1:1,tp1:3 @8"
    ]
    assert layout_lines("tp1:4 @8 | tp1:4 @8", "tp1:4 @8") == [
        "replica 1: replica removed: tp1:4 @8"
    ]
    assert "replica 0, stage 1: stage added: tp1, layers 1-3" in layout_lines(
        "tp1:4 @8", "tp1:1,tp1:3 @8"
    )


def test_devices_move() -> None:
    moved = with_stage(replace(PLAN, idle_devices=("b:2",)), 1, 0, devices=("b:1",))
    assert lines(PLAN, moved) == [
        "device b:1: moves idle -> replica 1, stage 0, tensor rank 0",
        "device b:2: moves replica 1, stage 0, tensor rank 0 -> idle",
    ]


def test_a_place_in_a_context_parallel_stage_has_its_context_rank() -> None:
    before = plan_from_layout(parse_layout("tp1:4 @8"))
    after = plan_from_layout(parse_layout("tp2cp2:4 @8"))
    devices = ("a:0", "a:1", "b:0", "b:1")
    assert lines(before, with_stage(after, 0, 0, devices=devices))[-4:] == [
        f"device {device}: moves not in the plan -> "
        f"replica 0, stage 0, tensor rank {tensor_rank}, context rank {context_rank}"
        for device, tensor_rank, context_rank in zip(
            devices, (0, 1, 0, 1), (0, 0, 1, 1), strict=True
        )
    ]


def test_settings_of_stage_and_job() -> None:
    assert lines(PLAN, with_stage(PLAN, 0, 0, recompute="full")) == [
        "replica 0, stage 0: recompute the job's -> full"
    ]
    assert lines(PLAN, with_training(PLAN, precision="bf16")) == [
        "training: precision fp32 -> bf16"
    ]
    assert lines(PLAN, replace(PLAN, workload=None)) == ["plan: workload removed: test"]
    assert lines(PLAN, replace(PLAN, hosts=PLAN.hosts[:1])) == [
        "launch: hosts in rank order a[0, 1, 2, 3], b[0, 2] -> a[0, 1, 2, 3]"
    ]


def test_estimates_have_a_ratio() -> None:
    assert lines(PLAN, with_estimates(PLAN, step_time_s=2.5, bound_s=None)) == [
        "estimates: step time 2 s -> 2.5 s (1.250x)",
        "estimates: lower bound removed: 1.5 s",
    ]
    assert lines(PLAN, with_estimates(PLAN, tokens_per_s=12345.6)) == [
        "estimates: throughput 100 tokens/s -> 12,346 tokens/s (123.456x)"
    ]
    assert diff_plans(PLAN, replace(PLAN, estimates=None)) == (
        Difference("estimates", "step time", "2 s", None),
    )


def test_memory_is_what_is_in_use_as_in_the_table_of_a_plan() -> None:
    parts = {"weights": 6 << 30, "reserve": 1 << 30}
    (old, new) = (
        with_estimates(PLAN, devices={"a:0": DeviceEstimate(24 << 30, 7 << 30, parts)}),
        with_estimates(PLAN, devices={"a:0": DeviceEstimate(24 << 30, 9 << 30, parts)}),
    )
    assert lines(old, new)[-1] == "device a:0: memory in use 6 GiB -> 8 GiB (1.333x)"


def test_the_step_time_comes_first() -> None:
    after = with_stage(with_estimates(PLAN, step_time_s=2.5), 0, 0, recompute="full")
    assert lines(PLAN, after)[0] == "estimates: step time 2 s -> 2.5 s (1.250x)"


def test_inputs_are_compared_by_hash() -> None:
    before = replace(PLAN, inputs={"cluster": "a" * 64})
    after = replace(PLAN, inputs={"cluster": "b" * 64}, made_by="me")
    assert lines(before, after) == [
        f"inputs: hash of the cluster {'a' * 12} -> {'b' * 12}",
        "plan: made by  -> me",
    ]


def test_counts_and_flags() -> None:
    assert lines(PLAN, with_replica(PLAN, 1, num_micro_batches=5)) == [
        "replica 1: micro-batches 4 -> 5"
    ]


def test_flags_are_compared_one_by_one() -> None:
    before = replace(workload(), megatron_args=("--bf16", "--lr", "1e-4", "--split", "9", "1"))
    after = replace(workload(), megatron_args=("--lr=-2", "--swiglu", "--split", "9", "1"))
    assert lines(replace(PLAN, workload=before), replace(PLAN, workload=after)) == [
        "Megatron flag: --bf16 removed: given",
        "Megatron flag: --lr 1e-4 -> -2",
        "Megatron flag: --swiglu added: given",
    ]


def test_a_size_is_compared_in_the_model_and_as_the_flag_that_gave_it() -> None:
    sizes = [
        replace(
            workload(),
            model=replace(workload().model, num_layers=layers),
            megatron_args=("--num-layers", str(layers)),
        )
        for layers in (8, 6)
    ]
    before, after = (replace(PLAN, workload=size) for size in sizes)
    assert lines(before, after) == [
        "model: num_layers 8 -> 6",
        "Megatron flag: --num-layers 8 -> 6",
    ]
