"""The plan of a job that trains in groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.errors import PlanFormatError, UnsupportedError, UsageError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.sequences.cluster_groups import cluster_groups
from megatron_hetero.sequences.job_plan import dealt_plan, groups_plan
from tests.cost.builders import FAST, SLOW, make_cluster
from tests.sequences.test_modelled import job


def test_ranks_are_the_gpus_in_the_order_of_the_groups() -> None:
    # Groups go by type of GPU, so the machine that the file has second comes last.
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 1), ("c", FAST, 1))
    workload = job(global_batch_size=10)
    groups = cluster_groups(cluster, workload)
    plan = groups_plan(cluster, groups, workload)
    assert [p.device for p in rank_table(plan)] == ["a:0", "a:1", "c:0", "b:0"]
    assert [d.name for d in groups.devices] == ["a:0", "a:1", "c:0", "b:0"]
    assert str(plan.layout) == "tp1:8 @3x1 | tp1:8 @3x1 | tp1:8 @2x1 | tp1:8 @2x1"


def test_a_step_has_a_sequence_for_each_rank() -> None:
    cluster = make_cluster(("a", FAST, 4))
    workload = job(global_batch_size=4)
    groups = cluster_groups(cluster, workload)
    assert len(groups_plan(cluster, groups, workload).replicas) == 4
    fewer = replace(workload, training=replace(workload.training, global_batch_size=3))
    with pytest.raises(UsageError, match=r"--global-batch-size 3.*Give 4 or more"):
        groups_plan(cluster, groups, fewer)


PAIR = "tp1:4,tp1:4 @4 | tp2:8 @2x2"


def asked(layout: str) -> Plan:
    return plan_from_layout(parse_layout(layout))


def test_a_layout_gets_the_gpus_rank_by_rank_and_micro_batches_of_one() -> None:
    cluster = make_cluster(("b", SLOW, 2), ("a", FAST, 2))
    plan = dealt_plan(cluster, asked(PAIR), job(global_batch_size=8))
    assert str(plan.layout) == "tp1:4,tp1:4 @4x1 | tp2:8 @4x1"
    assert [p.device for p in rank_table(plan)] == ["b:0", "b:1", "a:0", "a:1"]
    # What the plan was made for is one micro-batch of two sequences on each.
    made = replace(
        asked("tp1:4,tp1:4 @2 | tp2:8 @2"), workload=job(global_batch_size=8, micro_batch_size=2)
    )
    of_two = dealt_plan(cluster, made, job(global_batch_size=8))
    assert of_two.layout == plan.layout and of_two.workload is not None
    assert of_two.workload.training.micro_batch_size == 1
    # A plan with devices keeps them.
    assert dealt_plan(cluster, plan, job(global_batch_size=8)) == plan
    with pytest.raises(PlanFormatError):
        dealt_plan(make_cluster(("a", FAST, 4)), plan, job(global_batch_size=8))


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ("tp1cp2:8 @4 | tp2:8 @4", "context parallelism"),
        ("tp1:8z1 @2 | tp1:8z1 @2 | tp2:8z1 @4", "sharded layers"),
        ("tp2ep2:8 @4 | tp2ep2:8 @4", "experts"),
    ],
)
def test_parts_of_a_plan_that_deals_cannot_follow_are_named(layout: str, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        dealt_plan(make_cluster(("a", FAST, 4)), asked(layout), job(global_batch_size=8))


def test_orders_and_precisions_are_named() -> None:
    plan = asked("tp1:4,tp1:4 @2")
    stages = plan.replicas[0].stages
    for change, named in (({"order": "FFBB"}, "orders"), ({"precision": "fp16"}, "precision")):
        own = replace(plan.replicas[0], stages=tuple(replace(s, **change) for s in stages))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=named):
            dealt_plan(make_cluster(("a", FAST, 2)), replace(plan, replicas=(own,)), job())


def test_a_layout_uses_all_gpus() -> None:
    with pytest.raises(PlanFormatError, match="takes 4 GPUs, the cluster has 6"):
        dealt_plan(make_cluster(("a", FAST, 6)), asked(PAIR), job(global_batch_size=8))


def test_a_plan_has_the_jobs_global_batch() -> None:
    with pytest.raises(UsageError, match=r"--global-batch-size 7: .* have 8 sequences"):
        dealt_plan(make_cluster(("a", FAST, 4)), asked(PAIR), job(global_batch_size=7))
