"""Which plans are stock Megatron's, by shape, settings and rank order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.flags.stock import (
    is_stock,
    pipeline_layout,
    rank_orders,
    reasons_not_stock,
)
from megatron_hetero.plan.build import canonical_hosts, plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan, ReplicaShape, StageShape
from megatron_hetero.plan.validate import validate_plan
from tests.plan.edits import with_stage
from tests.plan.strategies import cluster_of, node, place, workload


def plan_of(text: str, *, with_workload: bool = False) -> Plan:
    return plan_from_layout(parse_layout(text), workload() if with_workload else None)


@pytest.mark.parametrize(
    "text",
    [
        "tp1:8 @16",
        "tp2:4,tp2:4 @8 | tp2:4,tp2:4 @8",
        "tp2:5,tp2:3 @8 | tp2:5,tp2:3 @8",
        "tp4:8 @8x1 | tp4:8 @8",
        "tp2(1:1):8 @16",
    ],
)
def test_symmetric_plans_are_stock(text: str) -> None:
    assert reasons_not_stock(plan_of(text, with_workload=True)) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp2:4,tp1:4 @16", "stages of different tensor-parallel widths (1, 2)"),
        ("tp2:8 @8 | tp1:8 @8", "stages of different tensor-parallel widths (1, 2)"),
        ("tp1:8 @8 | tp1:4,tp1:4 @8", "replicas of different pipeline depths"),
        ("tp1:5,tp1:3 @8 | tp1:4,tp1:4 @8", "replicas with different layers in a stage"),
        ("tp1:8 @12 | tp1:8 @4", "replicas with different numbers of micro-batches"),
        ("tp1:8 @4x2 | tp1:8 @4x1", "replicas with different micro-batch sizes"),
        ("tp2(2:1):8 @16", "tensor-parallel groups of uneven shares"),
        ("tp2(1:1):8 @16", "tensor-parallel groups of uneven shares"),  # no model to divide
    ],
)
def test_asymmetric_shapes_are_not(text: str, reason: str) -> None:
    assert reasons_not_stock(plan_of(text)) == (reason,)
    assert not is_stock(plan_of(text))


def test_settings_of_single_stages_are_not_stock() -> None:
    plan = plan_of("tp1:4,tp1:4 @16", with_workload=True)
    assert reasons_not_stock(with_stage(plan, 0, 1, recompute="full")) == (
        "stages with different recompute",
    )
    assert reasons_not_stock(with_stage(plan, 0, 1, precision="bf16")) == (
        "stages with a precision of their own",
    )
    assert reasons_not_stock(with_stage(plan, 0, 0, num_launched_forwards=4)) == (
        "a launch count of its own (replica 0, stage 0)",
    )
    same = with_stage(plan, 0, 0, num_launched_forwards=2, precision="fp32", recompute="none")
    assert is_stock(same)


def placed(order: list[str], **node_sizes: int) -> Plan:
    """Two replicas of two stages of width 1 on devices in reading order."""
    cluster = cluster_of(*(node(name, size) for name, size in node_sizes.items()))
    shape = ReplicaShape((StageShape(1, 4), StageShape(1, 4)), 8)
    replicas = place([shape, shape], order)
    plan = Plan(replicas, workload=workload(), hosts=canonical_hosts(replicas, cluster))
    validate_plan(plan)
    return plan


def test_rank_order_decides_between_the_two_mappings() -> None:
    # A node for each replica: ranks follow the pipeline first.
    assert rank_orders(placed(["a:0", "a:1", "b:0", "b:1"], a=2, b=2)) == ("tp-pp-dp",)
    # A node for each stage: ranks follow the replicas first, Megatron's default.
    assert rank_orders(placed(["a:0", "b:0", "a:1", "b:1"], a=2, b=2)) == ("tp-dp-pp",)
    # Neither: the second replica's first stage sits between.
    neither = placed(["b:0", "a:0", "c:0", "c:1"], a=1, b=1, c=2)
    assert rank_orders(neither) == ()
    assert reasons_not_stock(neither) == (
        "ranks bound to GPUs in an order that is neither of Megatron's two",
    )


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_a_bare_layout_follows_the_pipeline_first(width: int, depth: int, replicas: int) -> None:
    replica = f"{','.join([f'tp{width}:2'] * depth)} @4"
    orders = rank_orders(plan_of(" | ".join([replica] * replicas)))
    assert "tp-pp-dp" in orders
    assert ("tp-dp-pp" in orders) == (depth == 1 or replicas == 1)


def test_pipeline_layout_is_compact() -> None:
    assert pipeline_layout(plan_of("tp1:3,tp1:1,tp1:12 @4")) == "Et*3|t|t*12L"
    assert pipeline_layout(plan_of("tp1:1 @4")) == "EtL"


def test_rank_orders_are_those_of_megatrons_generator() -> None:
    from megatron.core.parallel_state import RankGenerator

    width, depth, num_replicas = 2, 3, 2
    for order, name in (("tp-cp-ep-dp-pp", "tp-dp-pp"), ("tp-cp-ep-pp-dp", "tp-pp-dp")):
        pipelines = RankGenerator(
            tp=width, ep=1, dp=num_replicas, pp=depth, cp=1, order=order
        ).get_ranks("pp")
        rank_of = {}
        for column, ranks in enumerate(pipelines):
            for stage, rank in enumerate(ranks):
                rank_of[column // width, stage, column % width] = rank
        devices = [
            f"a:{rank_of[r, s, t]}"
            for r in range(num_replicas)
            for s in range(depth)
            for t in range(width)
        ]
        cluster = cluster_of(node("a", 12))
        shape = ReplicaShape((StageShape(width, 2),) * depth, 8)
        replicas = place([shape] * num_replicas, devices)
        hosts = (replace(canonical_hosts(replicas, cluster)[0], gpu_indices=tuple(range(12))),)
        plan = Plan(replicas, hosts=hosts)
        validate_plan(plan)
        assert rank_orders(plan) == (name,)
