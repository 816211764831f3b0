"""Shrinking a workload: the plan's shape stays, and what cannot be trained is not left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.lab.verify.small.shrink import MAX_LAYERS, shrink
from megatron_hetero.plan.checks.validate import validate_plan
from tests.runtime.workloads import LLAMA_LIKE, plan, workload


def test_stages_keep_their_shape_and_get_fewer_layers() -> None:
    shrunk = shrink(plan("tp4(3:2:2:1):20,tp2:12 @3x2 | tp1:31,tp1:1 @2"), workload(num_layers=32))
    small = shrunk.plan.layout
    assert [[s.tensor_parallel for s in r.stages] for r in small.replicas] == [[4, 2], [1, 1]]
    assert small.replicas[0].stages[0].shares == (3, 2, 2, 1)
    assert [r.num_layers for r in small.replicas] == [MAX_LAYERS, MAX_LAYERS]
    assert [s.num_layers for s in small.replicas[1].stages] == [7, 1]
    assert [(r.num_micro_batches, r.micro_batch_size) for r in small.replicas] == [
        (3, 2),
        (2, None),
    ]
    assert shrunk.model.num_attention_heads % 8 == 0


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=10),
    st.lists(st.integers(1, 9), min_size=1, max_size=10),
)
def test_every_stage_keeps_a_layer(first: list[int], second: list[int]) -> None:
    difference = sum(first) - sum(second)
    if difference > 0:
        second = [*second[:-1], second[-1] + difference]
    else:
        first = [*first[:-1], first[-1] - difference]
    layout = " | ".join(",".join(f"tp1:{n}" for n in stages) + " @1" for stages in (first, second))
    shrunk = shrink(plan(layout), workload(num_layers=sum(first)))
    validate_plan(shrunk.plan)
    assert [len(r.stages) for r in shrunk.plan.replicas] == [len(first), len(second)]


def test_the_architecture_stays() -> None:
    args = shrink(plan("tp2:4 @1"), workload(**LLAMA_LIKE, sequence_parallel=True)).model_args
    for flag in (
        "--swiglu",
        "--group-query-attention",
        "--normalization=RMSNorm",
        "--disable-bias-linear",
        "--position-embedding-type=rope",
        "--untie-embeddings-and-output-weights",
        "--sequence-parallel",
    ):
        assert flag in args
    assert "--calculate-per-token-loss" not in args


def test_the_plan_alone_divides_the_optimizer() -> None:
    shrunk = shrink(plan("tp2:4 @1"), workload(use_distributed_optimizer=True))
    assert shrunk.plan_args == ("--use-distributed-optimizer",)
    assert "--use-distributed-optimizer" not in shrunk.model_args


def test_experts_stay_up_to_eight() -> None:
    shrunk = shrink(plan("tp2:4 @1"), workload(num_experts=64, moe_router_topk=6))
    assert shrunk.model.num_experts == 8
    assert {"--num-experts=8", "--moe-router-topk=6"} <= set(shrunk.model_args)


def test_a_stage_recomputes_no_more_layers_than_it_keeps() -> None:
    whole = plan("tp1:12,tp1:12 @1")
    stages = (
        replace(whole.replicas[0].stages[0], recompute="full", recompute_num_layers=9),
        whole.replicas[0].stages[1],
    )
    asked = replace(whole, replicas=(replace(whole.replicas[0], stages=stages),))
    small = shrink(asked, workload(num_layers=24)).plan.replicas[0].stages
    assert [s.recompute_num_layers for s in small] == [small[0].shape.num_layers, None]


@pytest.mark.parametrize(
    ("layout", "size"),
    [("tp1:2 @2x2", 2), ("tp1:2 @2x4 | tp1:2 @1x4", 4), ("tp1:2 @2x2 | tp1:2 @1", 1)],
)
def test_the_one_process_has_the_plans_micro_batches(layout: str, size: int) -> None:
    """Masked losses would be another objective under another size."""
    shrunk = shrink(plan(layout), workload(per_token_loss=True))
    assert f"--micro-batch-size={size}" in shrunk.model_args
    assert any("micro_batch_size" in change for change in shrunk.changes) == (size != 1)


def test_quick_geglu_is_not_trained_as_swiglu() -> None:
    job = replace(workload(gated_mlp=True), megatron_args=("--quick-geglu",))
    assert "--swiglu" not in shrink(plan("tp2:4 @1"), job).model_args


def test_shares_that_divide_nothing_small_leave_the_model_small() -> None:
    """Shares of 29:48 had made a model of 4,928 columns, whose norm rounds beyond its bound."""
    job = workload(num_layers=4, num_attention_heads=24, num_query_groups=8)
    small = shrink(plan("tp1:2,tp2(29:48):2 @4"), job).model
    assert (small.num_query_groups, small.num_attention_heads, small.hidden_size) == (8, 24, 192)
