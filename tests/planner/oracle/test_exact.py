"""`--strategy exact`, the main search beside it, and what more of anything may not do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.step_time import step_time_bound_s
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner import plan_cluster, portfolio
from megatron_hetero.planner.oracle.exact import Exact
from megatron_hetero.planner.oracle.prune import wanted_placements
from megatron_hetero.planner.portfolio import STRATEGIES, search
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.planner.naive import best_step_time_s
from tests.planner.strategies import cases, clusters, link_terms, workloads


def exact_s(cluster: Cluster, workload: Workload) -> float | None:
    """The best step time with 1F1B's own launch counts."""
    ranking = search(make_problem(cluster, workload), strategies=[Exact()]).ranking
    return ranking[0].step_time_s if ranking else None


@settings(max_examples=cases(40), deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_exact_is_brute_force(cluster: Cluster, workload: Workload) -> None:
    check_exact(cluster, workload)


def check_exact(cluster: Cluster, workload: Workload) -> None:
    expected = best_step_time_s(cluster, workload)
    found = exact_s(cluster, workload)
    assert found == (expected and pytest.approx(expected))


@settings(max_examples=cases(15), deadline=None)
@given(
    clusters(max_gpus=3).flatmap(link_terms), workloads(max_layers=3, max_micro_batches=3),
    st.booleans(),
)  # fmt: skip
def test_exact_is_brute_force_on_links_with_terms(
    cluster: Cluster, workload: Workload, is_divided: bool
) -> None:
    training = replace(workload.training, use_distributed_optimizer=is_divided)
    check_exact(cluster, replace(workload, training=training))


@settings(max_examples=cases(15), deadline=None)
@given(clusters(max_gpus=4) | clusters(max_gpus=6), workloads(max_layers=4, max_micro_batches=4))
def test_the_main_search_finds_the_optimum_and_the_bound_is_below_it(
    cluster: Cluster, workload: Workload
) -> None:
    problem = make_problem(cluster, workload)
    try:
        best = search(problem, strategies=[Exact()]).best
    except UsageError:  # too many placements for exact mode
        reject()
    found = search(problem).best
    assert (found is None) == (best is None)
    if best is not None and found is not None:
        assert found.step_time_s <= best.step_time_s * (1 + 1e-9)
        assert step_time_bound_s(problem.costs) <= found.step_time_s * (1 + 1e-9)


@settings(max_examples=cases(10), deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=4))
def test_more_bandwidth_and_one_more_gpu_never_make_it_worse(
    cluster: Cluster, workload: Workload
) -> None:
    before = exact_s(cluster, workload)
    faster = replace(
        cluster,
        node_links={
            pair: Link(2 * link.bytes_per_s, link.latency_s)
            for pair, link in cluster.node_links.items()
        },
    )
    first, *rest = cluster.nodes
    larger = replace(cluster, nodes=(replace(first, num_gpus=first.num_gpus + 1), *rest))
    for changed in (faster, larger):
        after = exact_s(changed, workload)
        if before is not None:
            assert after is not None and after <= before * (1 + 1e-9)


def test_an_exact_plan_has_no_gap() -> None:
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
    plan = plan_cluster(cluster, make_workload(num_layers=4, global_batch_size=4), strategy="exact")
    assert plan.estimates is not None
    assert plan.estimates.gap == 0.0
    assert plan.estimates.bound_s == plan.estimates.step_time_s


def test_what_is_too_large_for_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thirtieth of its work, which is as much too little."""
    less = {**STRATEGIES, "exact": lambda: (Exact(max_work=100_000),)}
    monkeypatch.setattr(portfolio, "STRATEGIES", less)
    cluster = make_cluster(("a", FAST, 8), ("b", SLOW, 8))
    workload = make_workload(num_layers=24, global_batch_size=64)
    with pytest.raises(UsageError, match="use --strategy auto"):
        plan_cluster(cluster, workload, strategy="exact")


def test_deep_models_are_not_looked_through_for_minutes() -> None:
    """The list of all placements is whole or given up, by work and not by time: six GPUs with 32
    layers had taken the main search 72 s."""
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
    problem = make_problem(cluster, make_workload(num_layers=24, global_batch_size=16))
    assert wanted_placements(problem, 0.12, 2_000) is None
    small = make_problem(cluster, make_workload(num_layers=4, global_batch_size=4))
    whole = wanted_placements(small, 0.01, 10**6)
    assert whole
    assert wanted_placements(small, 0.01, 100) is None


def test_exact_says_that_nothing_fits() -> None:
    cluster = make_cluster(("a", replace(FAST, memory_bytes=1 << 20), 1))
    with pytest.raises(InfeasiblePlanError):
        plan_cluster(cluster, make_workload(), strategy="exact")
