"""`plan --sends`: plans priced as other trainers send."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.arguments import with_sends
from megatron_hetero.cli.main import main
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.model.training import Sends
from megatron_hetero.plan.file import load_plan, plan_to_data, save_plan
from megatron_hetero.planner import plan_and_explain
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.report.text.terminal import sends_words
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.parts import EAGER_BYTES
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_cluster, make_workload

JOB = make_workload(num_layers=8, global_batch_size=16, seq_length=1024)
BUFFERED = with_sends(JOB, "buffered")
CHAIN = make_cluster(
    ("a", FAST, 1),
    ("b", SLOW, 1),
    between=Link(3e8, 1e-3),
    limits=replace(AS_GIVEN, num_replicas=1, first_stage_nodes=("a",), last_stage_nodes=("b",)),
)
"""One pipeline over a slow link, which stock Megatron runs."""
STOCK_ONLY = Objective(stock_only=True)
TWO_NODES = """version: 1
nodes: [{name: a, gpu: RTX-3090, count: 1}, {name: b, gpu: RTX-3090, count: 1}]
links: {between_nodes: {main: {bandwidth: 2 Gb/s, latency: 1 ms}}}
limits: {num_replicas: 1, first_stage: [a], last_stage: [b]}
"""
FLAGS = ["--num-layers=6", "--hidden-size=512", "--num-attention-heads=8", "--seq-length=512",
         "--max-position-embeddings=512", "--vocab-size=1000", "--micro-batch-size=1",
         "--global-batch-size=8", "--bf16"]  # fmt: skip


def test_a_buffered_plan_costs_what_its_simulation_says_and_keeps_its_bound() -> None:
    found = {}
    for job in (JOB, BUFFERED):
        plan, explanation = plan_and_explain(CHAIN, job, objective=STOCK_ONLY)
        assert is_stock(plan) and plan.estimates is not None and plan.estimates.bound_s is not None
        found[job.training.sends] = plan.estimates.step_time_s
        simulated = simulate_plan(plan, CHAIN)
        assert simulated.sends == ("waited" if job is JOB else "buffered")
        assert plan.estimates.step_time_s == pytest.approx(simulated.step_time_s, rel=1e-3)
        assert plan.estimates.bound_s <= plan.estimates.step_time_s
        again = estimate_plan(plan, CHAIN)
        assert again.step_time_s == pytest.approx(plan.estimates.step_time_s)
        stock = explanation.best_stock
        assert stock is not None
        assert stock.step_time_s <= plan.estimates.step_time_s * (1 + 1e-3)
    assert found["as-run"] > 1.05 * found["buffered"]


def free(cluster: Cluster) -> Cluster:
    return replace(cluster, limits=replace(cluster.limits, as_given=()))


@pytest.mark.parametrize(("size", "as_other"), [(1, "buffered"), (8, "as-run")])
def test_rendezvous_waits_for_receivers_of_large_messages_alone(size: int, as_other: Sends) -> None:
    """Up to 4 MiB as a trainer that goes on, above as stock Megatron of one GPU a stage."""
    job = make_workload(
        num_layers=8, global_batch_size=16, seq_length=1024, micro_batch_size=size
    )
    own, other = (
        plan_and_explain(CHAIN, with_sends(job, sends), objective=STOCK_ONLY)[0]
        for sends in ("rendezvous", as_other)
    )
    simulated = simulate_plan(own, CHAIN)
    assert simulated.sends == "rendezvous"
    num_bytes = size * 1024 * job.model.hidden_size * job.training.element_bytes
    assert (num_bytes > EAGER_BYTES) == (as_other == "as-run")
    expected = simulate_plan(other, CHAIN)
    assert simulated.step_time_s == pytest.approx(expected.step_time_s, rel=1e-9)
    assert own.estimates is not None and own.estimates.bound_s is not None
    assert own.estimates.step_time_s == pytest.approx(simulated.step_time_s, rel=1e-3)
    assert own.estimates.bound_s <= own.estimates.step_time_s
    assert "rendezvous" in sends_words(own)


def test_plans_for_rendezvous_launch_no_further_ahead_and_others_may_wait_for_ever() -> None:
    job = make_workload(num_layers=8, global_batch_size=64, seq_length=1024, micro_batch_size=8)
    cluster = free(CHAIN)
    own, _ = plan_and_explain(cluster, with_sends(job, "rendezvous"))
    assert all(s.num_launched_forwards is None for r in own.replicas for s in r.stages)
    ahead = replace(
        own,
        workload=with_sends(job, "rendezvous"),
        replicas=tuple(
            replace(
                r,
                num_micro_batches=8,
                micro_batch_size=8,
                stages=tuple(
                    replace(stage, num_launched_forwards=n)
                    for stage, n in zip(r.stages, (6, 1), strict=True)
                ),
            )
            for r in own.replicas
        ),
        estimates=None,
    )
    with pytest.raises(CheckFailedError, match="rendezvous"):
        simulate_plan(ahead, cluster)
    going_on = replace(ahead, workload=with_sends(job, "buffered"))
    assert simulate_plan(going_on, cluster, is_stock=False).sends == "buffered"


@pytest.mark.parametrize("cluster", [CHAIN, free(CHAIN)], ids=["as given", "free"])
def test_the_search_over_stock_flags_prices_sends_as_the_job_says(cluster: Cluster) -> None:
    found = best_stock_plan(make_problem(cluster, BUFFERED))
    assert found is not None and found.plan.workload is not None
    assert found.plan.workload.training.sends == "buffered"
    assert found.step_time_s == pytest.approx(simulate_plan(found.plan, cluster).step_time_s)
    waited = best_stock_plan(make_problem(cluster, JOB))
    assert waited is not None and found.step_time_s < waited.step_time_s


def test_the_file_says_it_and_files_without_it_are_as_they_were(tmp_path: Path) -> None:
    for job in (JOB, BUFFERED):
        plan, _ = plan_and_explain(CHAIN, job, objective=STOCK_ONLY)
        save_plan(plan, tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json") == plan
        written = plan_to_data(plan)["workload"]["training"]
        assert written.get("sends") == (None if job is JOB else "buffered")
        assert bool(sends_words(plan)) == (job is BUFFERED)


def test_later_verbs_take_the_plans_own_sends(tmp_path: Path, capsys) -> None:
    path, at = str(tmp_path / "plan.json"), tmp_path / "cluster.yaml"
    at.write_text(TWO_NODES)
    cluster = ["--cluster", str(at)]
    assert main(["plan", *cluster, "--stock", "--sends", "buffered", "-o", path, "--", *FLAGS]) == 0
    assert "buffered (--sends)" in " ".join(capsys.readouterr().out.split())
    found = {}
    for sends in ([], ["--sends", "as-run"], ["--sends", "buffered"]):
        assert main(["simulate", path, *cluster, "--json", *sends]) == 0
        found[" ".join(sends)] = json.loads(capsys.readouterr().out)["step_time_s"]
    assert found[""] == found["--sends buffered"] < found["--sends as-run"]
    assert main(["explain", path, *cluster, "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["step_time_s"] == pytest.approx(found[""], rel=0.01)
