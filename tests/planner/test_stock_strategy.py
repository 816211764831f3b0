"""What is printed beside a plan as the best of stock Megatron is what `--stock` plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.objective import Objective
from megatron_hetero.schedule.stock import common_micro_batch_size, is_stock, num_reasons_not_stock

BOX = """\
version: 1
nodes:
  - {name: box, gpu: RTX-3090, count: 1}
  - {name: volta, gpu: V100-16GB, count: 2}
links:
  inside_node: {V100-16GB: {bandwidth: 45 GB/s, latency: 8 us}}
  between_nodes: {bandwidth: 9.4 Gb/s, latency: 45 us}
limits: {memory_reserve: 1 GiB}
"""
FLAGS = (
    "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 "
    "--seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --vocab-size 32000 --micro-batch-size 2 "
    "--global-batch-size 32 --fp16 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --recompute-activations"
)
STOCK_ONLY = Objective(stock_only=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job whose best stock plan has another micro-batch size than the job."""
    path = tmp_path_factory.mktemp("box") / "cluster.yaml"
    path.write_text(BOX)
    return load_cluster(path), load_workload(None, FLAGS.split())


@pytest.fixture(scope="module")
def usual(job):
    return plan_and_explain(*job)


def test_stock_plans_the_row_that_is_printed(job, usual) -> None:
    row = usual[1].best_stock
    assert row is not None
    plan, explanation = plan_and_explain(*job, objective=STOCK_ONLY)
    assert plan.estimates is not None and is_stock(plan)
    assert plan.estimates.step_time_s <= row.step_time_s * (1 + 1e-9)
    assert explanation.num_priced > 0
    assert plan_cluster(*job, objective=STOCK_ONLY) == plan
    assert plan_cluster(*job, strategy="stock") == plan


def test_stock_keeps_the_size_that_the_cluster_holds_the_job_to(job) -> None:
    cluster, workload = job
    held = replace(cluster, limits=replace(cluster.limits, as_given=("micro_batch_size",)))
    own = workload.training.micro_batch_size
    free, kept = (plan_cluster(one, workload, strategy="stock") for one in (cluster, held))
    assert common_micro_batch_size(free) != own
    assert common_micro_batch_size(kept) == own


@pytest.mark.parametrize("within", [0.02, 0.05, 0.2, 0.5])
def test_no_printed_row_beats_the_simplest_in_both(job, usual, within: float) -> None:
    plan, explanation = plan_and_explain(*job, simplest_within=within)
    assert plan.estimates is not None
    best, row = usual[1], usual[1].best_stock
    assert plan.estimates.step_time_s <= (1 + within) * best.step_time_s
    is_near = row.step_time_s <= (1 + within) * best.step_time_s
    assert is_stock(plan) == is_near
    if is_near:
        assert plan.estimates.step_time_s <= row.step_time_s * (1 + 1e-9)
        assert explanation.fastest is not None and explanation.fastest.slower_by < 0
    shown = best.simplest
    if shown is not None and within >= 0.05:
        assert num_reasons_not_stock(plan) == 0 or shown.step_time_s >= plan.estimates.step_time_s


def test_the_usual_row_of_the_simplest_is_not_beaten_by_that_of_stock(usual) -> None:
    explanation = usual[1]
    stock, shown = explanation.best_stock, explanation.simplest
    assert shown is None or shown.step_time_s <= stock.step_time_s * (1 + 1e-9)


def test_where_the_search_of_the_plug_in_finds_no_stock_plan_that_of_stock_is_asked(job) -> None:
    cluster, workload = job
    training = replace(workload.training, micro_batch_size=32)
    flags = tuple("32" if w == "2" else w for w in workload.megatron_args)
    large = replace(workload, training=training, megatron_args=flags)
    plan = plan_cluster(cluster, large, objective=STOCK_ONLY)
    assert is_stock(plan) and common_micro_batch_size(plan) < 32


@pytest.mark.parametrize("strategy", ["auto", "stock"])
def test_stock_says_so_if_no_card_runs_the_precision(tmp_path, strategy: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{version: 1, nodes: [{name: old, gpu: T4, count: 1}]}")
    workload = load_workload(None, FLAGS.replace("--fp16", "--bf16").split())
    with pytest.raises(InfeasiblePlanError, match="no GPU of the cluster can be used"):
        plan_and_explain(load_cluster(path), workload, strategy=strategy, objective=STOCK_ONLY)
