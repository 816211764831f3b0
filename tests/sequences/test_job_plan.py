"""The plan of a job that trains in groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.sequences.cluster_groups import cluster_groups
from megatron_hetero.sequences.job_plan import groups_plan
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
