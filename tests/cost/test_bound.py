"""The lower bound never passes the best plan, and says something."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import CHOICES, Cluster
from megatron_hetero.cost import bound_launches
from megatron_hetero.cost.bound import step_time_bound, step_time_bound_s
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.run import search
from tests.cost.builders import FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.naive import best_step_time_s
from tests.planner.strategies import clusters, workloads


@settings(max_examples=60, deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_is_faster_than_the_bound(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        assert step_time_bound_s(CostModel(cluster, workload)) <= best_s * (1 + 1e-9)


@st.composite
def free_jobs(draw: st.DrawFn) -> tuple[Cluster, Workload]:
    """What plans may choose, and what the distributed optimizer and the exchange do, is drawn."""
    held = tuple(name for name in CHOICES if draw(st.booleans()))
    cluster = draw(clusters(max_gpus=4, limits=replace(FREE, as_given=held)))
    workload = draw(workloads(max_layers=5, max_micro_batches=12))
    training = replace(
        workload.training,
        use_distributed_optimizer=draw(st.booleans()),
        overlap_grad_reduce=draw(st.booleans()),
        per_token_loss=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full"])),
    )
    return cluster, replace(workload, training=training)


def check_no_plan_beats_it(cluster: Cluster, workload: Workload) -> None:
    """No plan that any strategy prices on its way, with settings of its own or without."""
    problem = make_problem(cluster, workload)
    board = search(problem)
    bound_s = step_time_bound_s(CostModel(problem.cluster, workload))
    for candidate in board.ranking_of_all:
        has_shares = any(s.shares for r in candidate.placement.replicas for s in r.stages)
        assert has_shares or bound_s <= candidate.step_time_s * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(free_jobs())
def test_no_plan_with_settings_of_its_own_is_faster(job: tuple[Cluster, Workload]) -> None:
    check_no_plan_beats_it(*job)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1500, deadline=None)
@given(free_jobs())
def test_no_plan_of_many_with_settings_is_faster(job: tuple[Cluster, Workload]) -> None:
    check_no_plan_beats_it(*job)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1500, deadline=None)
@given(clusters(max_gpus=4), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_of_many_is_faster(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        assert step_time_bound_s(CostModel(cluster, workload)) <= best_s * (1 + 1e-9)


def bound_by_prices_s(costs: CostModel) -> float:
    """The bound as in clusters whose GPUs are too many to be counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_launches, "_MAX_STATES", 0)
        patch.setattr(bound_launches, "_MAX_COUNTED", 0)
        return step_time_bound_s(costs)


def check_no_plan_beats_prices(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        assert bound_by_prices_s(CostModel(cluster, workload)) <= best_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_is_faster_than_the_bound_by_prices(cluster: Cluster, workload: Workload) -> None:
    check_no_plan_beats_prices(cluster, workload)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, deadline=None)
@given(clusters(max_gpus=4), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_of_many_is_faster_than_prices(cluster: Cluster, workload: Workload) -> None:
    check_no_plan_beats_prices(cluster, workload)


def test_prices_prove_nearly_as_much_as_numbers() -> None:
    """Two kinds of GPUs of which only whole layers fit: speeds alone are no good prices."""
    workload = make_workload(
        num_layers=12, hidden_size=2048, seq_length=2048, global_batch_size=64, recompute="full"
    )
    slow = replace(SLOW, memory_bytes=3 << 30)
    cluster = make_cluster(("a", FAST, 3), ("b", slow, 8))
    costs = CostModel(cluster, workload)
    by_numbers_s, by_prices_s = step_time_bound_s(costs), bound_by_prices_s(costs)
    assert 0.97 * by_numbers_s < by_prices_s <= by_numbers_s * 1.002


@settings(max_examples=25, deadline=None)
@given(free_jobs())
def test_ways_that_are_left_out_are_not_needed(job: tuple[Cluster, Workload]) -> None:
    costs = CostModel(*job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_launches, "needed_ways", lambda ways, steps, *_: (ways, steps))
        all_s = step_time_bound_s(costs)
    assert step_time_bound_s(costs) == pytest.approx(all_s, rel=1e-9)


def test_a_model_that_needs_all_memory_is_bounded_by_it() -> None:
    """One GPU is fast, but holds few layers: the slow one must take the rest, and paces it."""
    workload = make_workload(
        num_layers=16, hidden_size=2048, seq_length=2048, global_batch_size=32, recompute="full"
    )
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 2))
    costs = CostModel(cluster, workload)
    bound = step_time_bound(costs)
    slow = costs.pieces(cluster.node_by_name["b"], 1, workload.model.vocab_size).layer.total_s
    fast = costs.pieces(cluster.node_by_name["a"], 1, workload.model.vocab_size).layer.total_s
    by_work_s = 32 * 16 / (1 / fast + 2 / slow)
    assert bound.step_time_s > 1.02 * by_work_s
    assert "memory" not in bound.relaxes


def test_one_gpu_is_bounded_by_its_own_work() -> None:
    workload = make_workload(num_layers=4, global_batch_size=8)
    cluster = make_cluster(("a", FAST, 1))
    best_s = best_step_time_s(cluster, workload)
    bound = step_time_bound(CostModel(cluster, workload))
    assert best_s is not None
    assert bound.step_time_s <= best_s * (1 + 1e-9)
    assert bound.step_time_s == pytest.approx(best_s, rel=2e-3)


def test_equal_questions_get_equal_bounds() -> None:
    workload = make_workload(num_layers=12, global_batch_size=16)
    bounds = set()
    for names in (("a", "b"), ("b", "a")):
        nodes = {"a": ("a", FAST, 4), "b": ("b", SLOW, 4)}
        cluster = make_cluster(*(nodes[name] for name in names))
        bounds.add(step_time_bound_s(CostModel(cluster, workload)))
    assert len(bounds) == 1
