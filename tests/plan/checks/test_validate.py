"""Every invariant: a plan that breaks it is refused in words that name place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import canonical_hosts
from megatron_hetero.plan.checks import cluster as check_cluster
from megatron_hetero.plan.checks import devices as check_devices
from megatron_hetero.plan.checks import estimates as check_estimates
from megatron_hetero.plan.checks import structure as check_structure
from megatron_hetero.plan.checks import workload as check_workload
from megatron_hetero.plan.checks.validate import first_violations, validate_plan
from megatron_hetero.plan.estimates import DeviceEstimate
from megatron_hetero.plan.plan import Host, Plan, Replica, ReplicaShape, Stage, StageShape
from tests.plan.broken import BROKEN, BROKEN_FOR_CLUSTER
from tests.plan.edits import (
    CLUSTER,
    PLAN,
    with_estimates,
    with_host,
    with_model,
    with_replica,
    with_shape,
    with_stage,
    with_training,
)
from tests.plan.strategies import (
    cluster_of,
    node,
    place,
    placed_plans,
    workload,
)


def test_the_sound_plan_passes() -> None:
    validate_plan(PLAN)
    validate_plan(PLAN, CLUSTER)


def test_what_a_workload_keeps_of_its_hash_is_no_size() -> None:
    assert PLAN.workload is not None
    hash(PLAN.workload.model)
    for number in range(20):
        plan = with_model(PLAN, max_position_embeddings=4096 + number)
        assert plan.workload is not None
        hash(plan.workload)
        validate_plan(plan)


def test_a_gpu_used_twice_is_named_before_the_figures_it_left_behind() -> None:
    plan = with_estimates(PLAN, devices={"b:0": DeviceEstimate(2, 1, {})})
    twice = with_stage(plan, 0, 1, devices=("a:0",))
    with pytest.raises(PlanFormatError, match=r"device a:0 is in .*; a device has one place"):
        validate_plan(twice)


def test_old_figures_say_how_to_get_new_ones() -> None:
    plan = with_estimates(PLAN, devices={"a:9": DeviceEstimate(2, 1, {})})
    with pytest.raises(PlanFormatError, match=r"remove `estimates`, and let .* explain PLAN"):
        validate_plan(plan)


def test_the_file_stands_before_every_message() -> None:
    with pytest.raises(PlanFormatError, match=r"^mine\.json: the plan has no replica"):
        validate_plan(Plan(()), source="mine.json")


def test_every_invariant_has_a_plan_that_breaks_it() -> None:
    for module in (check_structure, check_devices, check_workload, check_estimates):
        assert set(module.INVARIANTS) <= set(BROKEN)
    assert set(check_cluster.INVARIANTS) == set(BROKEN_FOR_CLUSTER)


@pytest.mark.parametrize(
    ("invariant", "plan", "says"),
    [(f, plan, says) for f, cases in BROKEN.items() for plan, says in cases],
)
def test_a_broken_plan_is_refused(invariant: Callable[..., Any], plan: Plan, says: str) -> None:
    with pytest.raises(PlanFormatError, match=says):
        validate_plan(plan)
    assert first_violations(plan) == tuple(invariant(plan))


@pytest.mark.parametrize(
    ("invariant", "plan", "cluster", "says"),
    [(f, *case) for f, cases in BROKEN_FOR_CLUSTER.items() for case in cases],
)
def test_a_plan_for_another_cluster_is_refused(
    invariant: Callable[..., Any], plan: Plan, cluster: Cluster, says: str
) -> None:
    validate_plan(plan)
    with pytest.raises(PlanFormatError, match=says):
        validate_plan(plan, cluster)
    assert first_violations(plan, cluster) == tuple(invariant(plan, cluster))


def test_tensor_parallel_over_nodes_is_refused_where_forbidden() -> None:
    cluster = cluster_of(node("a", 1), node("b", 1, site="cloud"))
    replicas = place([ReplicaShape((StageShape(2, 8),), 16)], ["a:0", "b:0"])
    plan = Plan(replicas, workload=workload(), hosts=canonical_hosts(replicas, cluster))
    with pytest.raises(PlanFormatError, match=r"spans nodes a, b; .* across nodes"):
        validate_plan(plan, cluster)
    sites_only = replace(cluster, limits=Limits(no_tensor_parallel_across=("sites",)))
    with pytest.raises(PlanFormatError, match="spans sites cloud, main"):
        validate_plan(plan, sites_only)
    validate_plan(plan, replace(cluster, limits=Limits(no_tensor_parallel_across=())))


def test_what_the_flags_allow_is_not_refused() -> None:
    unlike_sizes = with_replica(PLAN, 1, num_micro_batches=2, micro_batch_size=2)
    validate_plan(with_training(unlike_sizes, per_token_loss=True))
    uneven = with_model(PLAN, num_attention_heads=6, num_query_groups=6, ffn_hidden_size=190)
    validate_plan(with_shape(uneven, 0, 0, shares=(2, 2, 1, 1)))
    validate_plan(with_stage(PLAN, 0, 0, recompute="full", recompute_num_layers=5))
    validate_plan(with_stage(PLAN, 0, 0, num_launched_forwards=12))


def test_many_violations_of_one_kind_are_shortened() -> None:
    stages = tuple(Stage(StageShape(5, 1), layer) for layer in range(8))
    with pytest.raises(PlanFormatError) as caught:
        validate_plan(Plan((Replica(stages, 16),), workload=workload()))
    lines = str(caught.value).split("\n")
    assert len(lines) == 6
    assert lines[-1] == "... and 19 more"


def test_hosts_by_address_are_allowed() -> None:
    for host in ("10.0.0.1", "fe80::1", "gpu-7.lab.example", "localhost"):
        validate_plan(with_host(PLAN, 0, host=host))


def test_a_host_without_devices_in_the_plan_is_refused() -> None:
    bare = Plan((Replica((Stage(StageShape(1, 8), 0),), 16),))
    with pytest.raises(PlanFormatError, match="has hosts, but its stages name no devices"):
        validate_plan(replace(bare, hosts=(Host("a", "a", "A100-40GB", (0,)),)))


@settings(max_examples=50)
@given(placed_plans())
def test_random_sound_plans_pass(planned: tuple[Plan, Cluster]) -> None:
    plan, cluster = planned
    validate_plan(plan, cluster)
