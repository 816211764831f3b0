"""An A100 and four RTX 4090: planned, rehearsed beside stock Megatron's best plan, and equal to one
process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.description import load_cluster
from megatron_hetero.flags.stock import is_stock
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner import plan_and_explain
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.run import search, strategies_of
from megatron_hetero.planner.search import plan_of
from megatron_hetero.runtime.rehearse.run import Options, rehearse
from megatron_hetero.runtime.verify.jobs import Options as VerifyOptions
from megatron_hetero.runtime.verify.run import outcome_to_data, verify

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/a100-rtx4090"


@pytest.mark.timeout(600)
def test_mixed_nodes_train_faster_than_stock_and_alike(tmp_path: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cluster = load_cluster(EXAMPLE / "cluster.yaml")
    workload = load_workload(EXAMPLE / "gpt-7b.sh", ("--global-batch-size=8",))
    plan, _ = plan_and_explain(cluster, workload)
    assert not is_stock(plan)
    problem = make_problem(cluster, workload)
    stock = search(problem, None, strategies_of("symmetric")).best_stock
    assert stock is not None
    ours = rehearse(plan, cluster, None, Options(steps=1), tmp_path / "ours")
    theirs = rehearse(
        plan_of(problem, stock, {}), cluster, None, Options(steps=1), tmp_path / "stock"
    )
    assert theirs.is_stock
    assert abs(ours.error) < 0.08
    assert abs(theirs.error) < 0.08
    assert theirs.step_time_s > 1.1 * ours.step_time_s
    small = replace(plan, estimates=None)
    outcome = verify(small, workload, VerifyOptions(steps=2, optimizers=("sgd",)), tmp_path / "one")
    assert outcome.ok, outcome_to_data(outcome)
