"""The planner's promises, on random clusters and models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.schedule.estimate import estimate_plan, plan_cost
from tests.cost.builders import FAST, OLD, SLOW, make_cluster, make_workload
from tests.planner.naive import best_step_time_s, naive_placements
from tests.planner.strategies import cases, clusters, workloads


@settings(max_examples=cases(50), deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_three_gpus_are_planned_as_by_brute_force(cluster: Cluster, workload: Workload) -> None:
    expected = best_step_time_s(cluster, workload)
    board = search(make_problem(cluster, workload))
    if expected is None:
        assert board.best is None
    else:
        assert board.best is not None
        assert board.ranking[0].step_time_s == pytest.approx(expected)
        assert board.best.step_time_s <= expected * (1 + 1e-12)


@settings(max_examples=cases(20), deadline=None)
@given(clusters(max_gpus=4), workloads(max_layers=3, max_micro_batches=2))
def test_four_gpus_are_planned_as_by_brute_force(cluster: Cluster, workload: Workload) -> None:
    expected = best_step_time_s(cluster, workload)
    ranking = search(make_problem(cluster, workload)).ranking
    best_s = ranking[0].step_time_s if ranking else None
    assert best_s == (expected and pytest.approx(expected))


@settings(max_examples=cases(12), deadline=None)
@given(clusters(max_gpus=8), workloads(max_layers=10, max_micro_batches=12))
def test_plans_are_valid_fit_and_beat_the_naive_ones(cluster: Cluster, workload: Workload) -> None:
    problem = make_problem(cluster, workload)
    naive = search(problem, strategies=[Symmetric()]).best
    try:
        plan = plan_cluster(cluster, workload)
    except InfeasiblePlanError:
        assert naive is None
        return
    validate_plan(plan, cluster)
    estimates = estimate_plan(plan, cluster)
    assert plan.estimates is not None
    assert plan.estimates.step_time_s == pytest.approx(estimates.step_time_s)
    for device in plan.estimates.devices.values():
        assert device.peak_bytes <= device.capacity_bytes
    assert sum(r.num_micro_batches for r in plan.replicas) == problem.num_micro_batches
    assert min(r.num_micro_batches for r in plan.replicas) >= 1
    assert set(plan.idle_reasons) == set(plan.idle_devices)
    assert estimates.bound_s is not None
    assert estimates.bound_s <= estimates.step_time_s * (1 + 1e-12)
    others = list(naive_placements(cluster, workload)) + ([naive.placement] if naive else [])
    for placement in others:
        candidate = Scoreboard(problem).score(placement, "naive")
        if candidate is not None:
            # Plans are priced as they run: with the queues on paths that replicas share, and by
            # stock Megatron if it can.  So is this one.
            other = bare_plan(problem, candidate, {})
            other_s = plan_cost(other, problem.costs, candidate.placement).step_time_s
            assert estimates.step_time_s <= other_s * (1 + 1e-12)


@settings(max_examples=cases(20), deadline=None)
@given(clusters(max_gpus=5), workloads(max_layers=5, max_micro_batches=6), st.randoms())
def test_the_order_of_the_file_does_not_count(
    cluster: Cluster, workload: Workload, random: Random
) -> None:
    nodes = list(cluster.nodes)
    random.shuffle(nodes)
    links = list(cluster.node_links.items())
    random.shuffle(links)
    shuffled = replace(cluster, nodes=tuple(nodes), node_links=dict(links))
    try:
        expected = plan_to_data(plan_cluster(cluster, workload))
    except InfeasiblePlanError as error:
        with pytest.raises(InfeasiblePlanError) as caught:
            plan_cluster(shuffled, workload)
        assert str(caught.value) == str(error)
        return
    assert plan_to_data(plan_cluster(shuffled, workload)) == expected


@settings(max_examples=cases(6), deadline=None)
@given(clusters(max_gpus=5), workloads(max_layers=5, max_micro_batches=6), st.randoms())
def test_the_names_of_nodes_do_not_count(
    cluster: Cluster, workload: Workload, random: Random
) -> None:
    old = [node.name for node in cluster.nodes]
    new = dict(zip(old, random.sample(["x", "c", "b", "a"], len(old)), strict=True))
    nodes = [replace(node, name=new[node.name], host=new[node.host]) for node in cluster.nodes]
    links = {(new[a], new[b]): link for (a, b), link in cluster.node_links.items()}
    renamed = replace(cluster, nodes=tuple(random.sample(nodes, len(nodes))), node_links=links)
    boards = [search(make_problem(of, workload)) for of in (cluster, renamed)]
    one, other = (board.best for board in boards)
    if one is None or other is None:
        assert one is None and other is None
        return
    types = {node.name: node.gpu_type.name for node in (*cluster.nodes, *nodes)}
    forms = [
        sorted(
            [(types[s.devices[0].node], s.width, s.num_layers) for s in replica.stages]
            for replica in best.placement.replicas
        )
        for best in (one, other)
    ]
    assert one.coarse_key == other.coarse_key
    assert forms[0] == forms[1]


def test_the_hash_seed_does_not_count() -> None:
    code = (
        "from tests.planner.test_api import mixed_plan\n"
        "from megatron_hetero.plan.file import plan_to_data; import json\n"
        "print(json.dumps(plan_to_data(mixed_plan()), sort_keys=True))"
    )
    # Another seed than this process has.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(plan_to_data(mixed_plan())))


def mixed_plan() -> Plan:
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4), ("c", SLOW, 2))
    return plan_cluster(cluster, make_workload(num_layers=12, global_batch_size=16))


def test_unlike_gpus_get_layers_in_proportion_to_speed() -> None:
    cluster = make_cluster(
        ("a", replace(FAST, memory_bytes=16 << 30), 1),
        ("b", replace(SLOW, memory_bytes=16 << 30), 1),
    )
    workload = make_workload(
        num_layers=24,
        hidden_size=2048,
        seq_length=2048,
        global_batch_size=64,
        tied_embeddings=False,
        recompute="full",
    )
    plan = plan_cluster(cluster, workload)
    assert len(plan.replicas) == 1
    layers = {s.devices[0][0]: s.shape.num_layers for s in plan.replicas[0].stages}
    assert layers["a"] > 2 * layers["b"]


def test_gpus_without_the_precision_stay_idle_and_say_so() -> None:
    plan = plan_cluster(make_cluster(("a", FAST, 1), ("o", OLD, 2)), make_workload())
    assert plan.idle_devices == ("o:0", "o:1")
    assert plan.idle_reasons["o:0"] == "OLD cannot train in bf16"
    fp8 = replace(FAST, name="NEW", peak_flops={**FAST.peak_flops, "fp8": 6e14})
    plan = plan_cluster(make_cluster(("n", fp8, 1), ("o", FAST, 1)), make_workload(fp8=True))
    assert plan.idle_reasons == {"o:0": "FAST cannot train in bf16 with --fp8-format"}


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_tensor_parallel=1),
        Limits(max_pipeline_parallel=2),
        Limits(num_replicas=2),
        Limits(idle_devices=("a:0", "c")),
        Limits(first_stage_nodes=("b",), last_stage_nodes=("a",)),
        Limits(no_tensor_parallel_across=("nodes", "a")),
    ],
)
def test_limits_hold(limits: Limits) -> None:
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 2), ("c", SLOW, 2), limits=replace(limits))
    plan = plan_cluster(cluster, make_workload(num_layers=8, global_batch_size=8), bounded=False)
    validate_plan(plan, cluster)
    for device in limits.idle_devices:
        assert any(idle.startswith(device) for idle in plan.idle_devices)


def test_data_parallelism_can_be_kept_inside_sites() -> None:
    cluster = make_cluster(
        ("a", FAST, 2),
        ("b", FAST, 2),
        sites=("here", "there"),
        limits=Limits(no_data_parallel_across_sites=True, memory_reserve_bytes=0),
    )
    plan = plan_cluster(cluster, make_workload(num_layers=8, global_batch_size=8))
    validate_plan(plan, cluster)


def test_the_job_itself_is_checked() -> None:
    cluster = make_cluster(("a", FAST, 1))
    with pytest.raises(UsageError, match="no multiple"):
        plan_cluster(cluster, make_workload(global_batch_size=5, micro_batch_size=2))
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 256}
    with pytest.raises(UsageError, match="--num-experts 8 without --sequence-parallel"):
        plan_cluster(cluster, make_workload(**experts))


def test_a_model_of_experts_is_planned() -> None:
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 1026}
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 3))
    plan = plan_cluster(cluster, make_workload(**experts, num_layers=6, sequence_parallel=True))
    validate_plan(plan, cluster)


def test_progress_falls_and_counts() -> None:
    calls: list[tuple[float, int, float]] = []
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4))
    plan = plan_cluster(
        cluster,
        make_workload(num_layers=12, global_batch_size=16),
        progress=lambda *told: calls.append(told),
    )
    assert calls == sorted(calls, key=lambda call: (-call[0], call[1]))
    assert plan.estimates is not None
    # The plan that comes out is priced once more, with the queues on paths that replicas share.
    assert calls[-1][0] <= plan.estimates.step_time_s
    bounds_s = {bound_s for _, _, bound_s in calls}
    assert plan.estimates.bound_s is not None
    assert len(bounds_s) == 1
    assert 0 < bounds_s.pop() <= plan.estimates.bound_s


def test_explanation_adds_up() -> None:
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
    workload = make_workload(num_layers=12, global_batch_size=16, seq_length=2048)
    plan, explanation = plan_and_explain(cluster, workload)
    causes = explanation.time_by_cause
    total_s = sum(vars(causes).values())
    assert total_s == pytest.approx(explanation.step_time_s)
    assert all(value >= 0 for value in vars(causes).values())
    assert plan.estimates is not None
    for name, estimate in plan.estimates.devices.items():
        spare = estimate.capacity_bytes - estimate.peak_bytes
        assert explanation.headroom_bytes[name] == spare
    stock = explanation.best_stock
    assert stock is not None
    assert stock.slower_by == pytest.approx(stock.step_time_s / explanation.step_time_s - 1)
    layouts = [a.layout for a in explanation.runners_up]
    assert layouts and format_layout(plan.layout) not in layouts
    assert all(a.slower_by >= 0 for a in explanation.runners_up)


def test_sixteen_gpus_are_planned_within_the_work_limit() -> None:
    """Effort is counted in placements, so the figures do not depend on the machine."""
    workload = make_workload(num_layers=24, hidden_size=1024, seq_length=1024, global_batch_size=64)
    cluster = make_cluster(("a", FAST, 8), ("b", SLOW, 8))
    board = search(make_problem(cluster, workload))
    assert board.best is not None and board.num_priced < 20_000


def test_the_distributed_optimizer_makes_room() -> None:
    """Eight replicas of a model whose states fit on no GPU by themselves; the estimates say so."""
    cluster = make_cluster(("a", replace(FAST, memory_bytes=600 << 20), 8))
    jobs = [
        make_workload(num_layers=12, global_batch_size=8, use_distributed_optimizer=on)
        for on in (True, False)
    ]
    sharded, whole = (plan_cluster(cluster, job) for job in jobs)
    assert len(sharded.replicas) > len(whole.replicas)
    assert sharded.estimates is not None and whole.estimates is not None
    assert sharded.estimates.step_time_s < whole.estimates.step_time_s
    assert sharded.estimates == estimate_plan(sharded, cluster)
    validate_plan(sharded, cluster)
