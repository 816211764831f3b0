"""Experts dealt out over replicas in the search: never slower than without, priced as the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.bounds.estimate import estimates_of
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.sharding.expert_groups import expert_groups
from megatron_hetero.planner.dealt_search import DealtSearch
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.schedule.estimate import plan_cost
from megatron_hetero.schedule.proof.check import check_operations
from tests.cost.builders import FAST, FREE, make_cluster
from tests.planner.test_dealt_experts import DIVIDED, many_experts, mixed

JOBS = {
    "unlike groups of a pipeline": (many_experts(use_distributed_optimizer=True), 2),
    "groups wider than a stage": (
        many_experts(use_distributed_optimizer=True, moe_ffn_hidden_size=2048),
        4,
    ),
    "whole states": (many_experts(moe_ffn_hidden_size=2048), 8),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_found_is_faster_and_priced_as_its_plan(name: str) -> None:
    job, memory_gib = JOBS[name]
    assert _saved(job, FREE, memory_gib) > 0.05


def test_nothing_is_dealt_out_where_shares_are_given() -> None:
    assert _saved(many_experts(), DIVIDED, 16) == 0.0


def _saved(job: Workload, limits: Limits, memory_gib: int) -> float:
    """Check what the search adds to the usual grids; the part of their step that it saves."""
    cluster = mixed(limits, memory_gib)
    problem = make_problem(cluster, job)
    board = search(problem, None, (Symmetric(),))
    before = Rescorer(board).best()
    DealtSearch().search(board)
    best = Rescorer(board).best()
    assert before is not None and best is not None and best.step_time_s <= before.step_time_s
    if not best.placement.has_expert_groups:
        return 0.0
    # The plan has the groups that were priced, is valid, and its exchanges end.
    plan = bare_plan(problem, best, {})
    validate_plan(plan, problem.cluster)
    assert plan.workload is not None
    check_operations(plan, plan.workload)
    assert expert_groups(plan)
    read = placement_of(plan, problem.cluster)
    assert replace(best.placement, dispatcher=None) == read
    # Read back, it takes as long and as much memory.
    costs = CostModel(problem.cluster, plan.workload)
    cost = plan_cost(plan, costs, read)
    assert cost.step_time_s == pytest.approx(best.step_time_s, rel=1e-9)
    assert cost.missing_bytes <= 0
    bound_s = estimates_of(costs, read, cost).bound_s
    assert bound_s is None or bound_s <= cost.step_time_s * (1 + 1e-12)
    return 1 - best.step_time_s / before.step_time_s


def test_a_cluster_without_a_usable_gpu_is_said_so() -> None:
    old = replace(FAST, peak_flops={**FAST.peak_flops, "fp8": None, "bf16": None})
    problem = make_problem(make_cluster(("a", old, 4), limits=FREE), many_experts())
    assert not problem.nodes
    assert Rescorer(search(problem)).best() is None
