"""Plans that stock Megatron can run, by shape, settings and rank order."""

from __future__ import annotations

import pytest

from megatron_hetero.flags.stock import is_even_split, pipeline_layout
from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.plan.build import canonical_hosts, plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan, ReplicaShape, StageShape
from megatron_hetero.schedule.stock import is_stock, reasons_not_stock
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
        (
            "tp1cp2:4,tp1cp2:4 @16",
            "sequences divided without Transformer Engine's attention (cp)",  # no job says more
        ),
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
        "launch counts (forwards before the first backward) other than 1F1B's (replica 0)",
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


@pytest.mark.parametrize("order", ["a:0 a:1 b:0 b:1", "a:0 b:0 a:1 b:1"])
def test_a_node_for_each_replica_or_for_each_stage_is_stock(order: str) -> None:
    assert is_stock(placed(order.split(), a=2, b=2))


def test_an_order_of_hosts_that_stock_megatron_lacks() -> None:
    listed_otherwise = placed(["b:0", "a:0", "c:0", "c:1"], a=1, b=1, c=2)
    assert reasons_not_stock(listed_otherwise) == (
        "ranks in neither of Megatron's two orders (with hosts, their GPUs and replicas listed in "
        "another order they are: plan again)",
    )


def test_a_node_at_both_ends_of_a_pipeline_is_not_stock() -> None:
    cluster = cluster_of(node("slow", 2), node("fast", 2))
    replicas = place(
        [ReplicaShape((StageShape(1, 2),) * 4, 16)], ["slow:0", "fast:0", "fast:1", "slow:1"]
    )
    plan = Plan(replicas, workload=workload(), hosts=canonical_hosts(replicas, cluster))
    assert reasons_not_stock(plan) == (
        "stages that return to a node, whose GPUs stock Megatron numbers one after the other "
        "(ranks 0 and 3 on slow)",
    )


def test_pipeline_layout_is_compact() -> None:
    assert pipeline_layout(plan_of("tp1:3,tp1:1,tp1:12 @4")) == "Et*3|t|t*12L"
    assert pipeline_layout(plan_of("tp1:1 @4")) == "EtL"


def test_megatrons_own_interleaving_is_stock() -> None:
    """Chunks in turn in Megatron's order; another order of the same chunks is not."""
    whole = plan_of("tp1:3,tp1:3 @4 | tp1:3,tp1:3 @4")
    layers = [(0, 2), (1, 1), (0, 1), (1, 2)]
    plan = with_interleaving(with_interleaving(whole, 0, layers), 1, layers)
    assert reasons_not_stock(plan) == ()
    assert not is_even_split(plan)
    assert pipeline_layout(plan) == "Et*2|t|t|t*2L"
    other = with_stage(plan, 0, 1, order="F" * 4 + "F1" * 4 + "B1" * 4 + "B" * 4)
    assert reasons_not_stock(other) == ("stages with an order of their own",)
    unlike = with_interleaving(plan, 1, [(0, 1), (1, 1), (0, 2), (1, 2)])
    assert reasons_not_stock(unlike) == ("replicas with different layers in a stage",)
