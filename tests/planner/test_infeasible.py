from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.spec import Cluster, Limits
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner import plan_cluster
from tests.cost.builders import FAST, GIB, OLD, make_cluster, make_workload

SMALL = replace(FAST, name="SMALL", memory_bytes=2 * GIB)


def message(cluster: Cluster, workload: Workload) -> str:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_cluster(cluster, workload)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_the_shortage_names_stage_gpu_and_bytes_and_more_gpus_help() -> None:
    text = message(make_cluster(("a", SMALL, 1)), make_workload(num_layers=80))
    assert "stage 0 of replica 0 (80 layers on 1x SMALL, a)" in text
    assert "bytes) more on each GPU" in text
    assert "most goes to optimizer" in text
    assert "(planned and checked): 1 more SMALL" in text or "3 more SMALL" in text


def test_recompute_is_the_first_relaxation_when_it_suffices() -> None:
    workload = make_workload(
        num_layers=16, seq_length=2048, micro_batch_size=1, flash_attention=False
    )
    text = message(make_cluster(("a", SMALL, 1)), workload)
    assert "(planned and checked): --recompute-granularity selective" in text


def test_a_smaller_micro_batch_is_found() -> None:
    workload = make_workload(
        num_layers=16, seq_length=1024, global_batch_size=64, micro_batch_size=64, recompute="full"
    )
    text = message(make_cluster(("a", SMALL, 1)), workload)
    assert "(planned and checked): --micro-batch-size 16" in text


def test_a_limit_can_be_the_cause() -> None:
    limits = Limits(max_pipeline_parallel=1, max_tensor_parallel=1, memory_reserve_bytes=0)
    cluster = make_cluster(("a", SMALL, 4), limits=limits)
    text = message(cluster, make_workload(num_layers=48, recompute="full"))
    assert "limits.max_tensor_parallel 2 instead of 1" in text


def test_no_gpu_in_the_precision() -> None:
    text = message(make_cluster(("o", OLD, 4)), make_workload())
    assert "no GPU of the cluster can be used (in bf16" in text
    assert "--fp16 instead of --bf16" in text
