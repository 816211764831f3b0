"""What stages and replicas set for themselves, against brute force over the same settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.step_time import step_time_bound_s
from megatron_hetero.cluster.limits import CHOICES
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import deals_experts, micro_batch_sizes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.placing import with_optimizer_shares
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.division.counts import MIN_GAIN
from megatron_hetero.planner.evaluate.candidate import PLUGIN_GAIN
from megatron_hetero.planner.oracle.structures import all_structures, compositions
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.schedule.estimate import estimate_plan
from tests.cost.builders import FAST, FREE, GIB, SLOW, make_cluster, make_workload
from tests.planner.strategies import clusters, expert_workloads, workloads


def every_setting(costs: CostModel, stage: PlacedStage) -> Iterator[PlacedStage]:
    """The stage with every recompute that it could have, its experts divided or dealt out."""
    yield from every_recompute(stage)
    if deals_experts(costs) and stage.width > 1:
        yield from every_recompute(replace(stage, expert_shares=(1,) * stage.width))


def every_recompute(stage: PlacedStage) -> Iterator[PlacedStage]:
    """The stage with every recompute that it could have."""
    yield replace(stage, recompute="none")
    yield replace(stage, recompute="selective")
    yield replace(stage, recompute="full")
    for some in range(1, stage.num_layers):
        yield replace(stage, recompute="full", recompute_num_layers=some)


@settings(max_examples=40, deadline=None)
@given(
    num_layers=st.integers(1, 10),
    memory_gib=st.floats(0.5, 4),
    size=st.sampled_from([1, 2, 4]),
    job=st.sampled_from(["none", "selective", "full"]),
    flash=st.booleans(),
    depth=st.integers(2, 6),
)
def test_a_stage_recomputes_as_brute_force_would(
    num_layers: int, memory_gib: float, size: int, job: str, flash: bool, depth: int
) -> None:
    """The first stage of a pipeline that keeps `depth` micro-batches there."""
    gpu = replace(SLOW, memory_bytes=int(memory_gib * GIB))
    cluster = make_cluster(("a", gpu, 2), limits=FREE)
    workload = make_workload(
        num_layers, 1024, 8, size, seq_length=1024, recompute=job, flash_attention=flash
    )
    costs, (device, other) = CostModel(cluster, workload), cluster.devices
    rows = costs.vocab_rows([1])
    ways = StageOptions(costs, rows).of(StagePlace((device,), None, True, False, depth))
    behind = (PlacedStage((other,), 1),) * (depth - 1)
    for count in range(1, num_layers + 1):
        priced = [
            costs.stage(PlacedReplica((stage, *behind), depth), 0, rows)
            for stage in every_recompute(PlacedStage((device,), count))
        ]
        fitting = [cost.times.total_s for cost in priced if cost.missing_bytes <= 0]
        assert (count <= len(ways)) == bool(fitting)
        if fitting:
            assert ways[count - 1].time_s == pytest.approx(min(fitting))


def brute_force_s(problem: Problem) -> float | None:
    """The best of all structures, layers, recomputes, micro-batches and their (common) size."""
    costs, batch = problem.costs, problem.workload.training.global_batch_size
    found = []
    for structure in all_structures(problem):
        choices = []
        for chain in structure:
            choices.append(
                [
                    stages
                    for layers in compositions(problem.num_layers, len(chain))
                    for stages in product(
                        *(
                            list(every_setting(costs, PlacedStage(unit.devices, n)))
                            for unit, n in zip(chain, layers, strict=True)
                        )
                    )
                ]
            )
        for size in micro_batch_sizes(costs, len(structure)):
            for shares in compositions(batch // size, len(structure)):
                for chosen in product(*choices):
                    placement = Placement(
                        tuple(
                            PlacedReplica(stages, share, micro_batch_size=size)
                            for stages, share in zip(chosen, shares, strict=True)
                        )
                    )
                    cost = costs.placement(placement)
                    if cost.missing_bytes <= 0:
                        found.append(cost.step_time_s)
    return min(found, default=None)


@settings(max_examples=25, deadline=None)
@given(clusters(max_gpus=2, limits=FREE), workloads(max_layers=3, max_micro_batches=4))
def test_two_gpus_are_planned_as_by_brute_force(cluster: Cluster, workload: Workload) -> None:
    problem = make_problem(cluster, workload)
    expected, best = brute_force_s(problem), search(problem).best
    assert (best is None) == (expected is None)
    if best is not None and expected is not None:
        # What the job's flags do not say must bring half a percent.
        assert best.step_time_s <= expected * (1 + 1e-9) / (1 - MIN_GAIN)
        assert step_time_bound_s(problem.costs) <= expected * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(clusters(max_gpus=2, limits=FREE), expert_workloads(max_layers=3))
def test_two_gpus_deal_experts_out_as_by_brute_force(cluster: Cluster, workload: Workload) -> None:
    problem = make_problem(cluster, workload)
    expected, best = brute_force_s(problem), search(problem).best
    assert (best is None) == (expected is None)
    if best is not None and expected is not None:
        # What takes the plug-in must bring two percent.
        assert best.step_time_s <= expected * (1 + 1e-9) / (1 - PLUGIN_GAIN)
        assert step_time_bound_s(problem.costs) <= expected * (1 + 1e-9)


@settings(max_examples=8, deadline=None)
@given(
    clusters(max_gpus=4, limits=FREE),
    st.one_of(workloads(max_layers=8, max_micro_batches=12), expert_workloads(max_layers=8)),
    st.sampled_from(["none", "full"]),
    st.booleans(),
)
def test_plans_are_valid_fit_and_are_never_worse_than_without(
    cluster: Cluster, workload: Workload, recompute: str, sharded: bool
) -> None:
    training = replace(
        workload.training,
        recompute=recompute,
        use_distributed_optimizer=sharded,
    )
    workload = replace(workload, training=training)
    held = replace(cluster, limits=replace(FREE, as_given=CHOICES))
    plain = search(make_problem(held, workload)).best
    try:
        plan = plan_cluster(cluster, workload)
    except InfeasiblePlanError:
        assert plain is None
        return
    validate_plan(plan, cluster)
    estimates = estimate_plan(plan, cluster)
    assert plan.estimates is not None and estimates.bound_s is not None
    assert plan.estimates.step_time_s == pytest.approx(estimates.step_time_s)
    assert estimates.bound_s <= estimates.step_time_s * (1 + 1e-12)
    assert all(d.peak_bytes <= d.capacity_bytes for d in plan.estimates.devices.values())
    if plain is not None:
        assert estimates.step_time_s <= plain.step_time_s * (1 + 1e-12)


def test_limits_hold_the_job_to_its_flags() -> None:
    """A job that cannot be planned without recompute, and the same held to its flags."""
    cluster = make_cluster(("a", replace(SLOW, memory_bytes=4 * GIB), 2), limits=FREE)
    workload = make_workload(28, 1024, 8, seq_length=2048)
    plan = plan_cluster(cluster, workload)
    assert any(s.recompute == "full" for r in plan.replicas for s in r.stages)
    held = replace(cluster, limits=replace(FREE, as_given=("recompute",)))
    with pytest.raises(InfeasiblePlanError):
        plan_cluster(held, workload)


def test_a_roomy_stage_recomputes_nothing_of_a_job_that_recomputes_all() -> None:
    cluster = make_cluster(("a", SLOW, 2), limits=FREE)
    plan = plan_cluster(cluster, make_workload(8, 1024, 8, recompute="full"))
    assert {s.recompute for r in plan.replicas for s in r.stages} == {"none"}


TWO_ALONE = replace(FREE, num_replicas=2, max_pipeline_parallel=1)
"""Two replicas of one stage each."""


def test_the_optimizers_states_go_where_there_is_room() -> None:
    """A small GPU that cannot keep half of the states beside a roomy one that can keep more."""
    nodes = ("a", SLOW, 1), ("b", replace(SLOW, name="SMALL", memory_bytes=int(1.15 * GIB)), 1)
    workload = make_workload(8, 1024, 8, use_distributed_optimizer=True)
    held = replace(TWO_ALONE, as_given=("optimizer_share",))
    with pytest.raises(InfeasiblePlanError):
        plan_cluster(make_cluster(*nodes, limits=held), workload)
    cluster = make_cluster(*nodes, limits=TWO_ALONE)
    plan = plan_cluster(cluster, workload)
    validate_plan(plan, cluster)
    shares = {r.stages[0].devices[0]: r.stages[0].optimizer_share or 1 for r in plan.replicas}
    assert shares["a:0"] > shares["b:0"]
    costs = CostModel(cluster, workload)
    alone = [PlacedReplica((PlacedStage((d,), 8),), 4) for d in cluster.devices]
    possible = []
    for pair in product(range(1, 17), repeat=2):
        placement = with_optimizer_shares(Placement(tuple(alone)), [[share] for share in pair])
        cost = costs.placement(placement)
        if cost.missing_bytes <= 0:
            possible.append(cost.step_time_s)
    assert plan.estimates is not None and possible
    # Micro-batch size and count are free as well; the update is all that shares change.
    assert plan.estimates.step_time_s <= min(possible) / (1 - MIN_GAIN)


@settings(max_examples=15, deadline=None)
@given(clusters(max_gpus=2, limits=TWO_ALONE), st.sampled_from([4, 8, 12]), st.booleans())
def test_unlike_micro_batch_sizes_are_those_of_brute_force(
    cluster: Cluster, batch: int, short: bool
) -> None:
    workload = make_workload(
        2, 512, batch, seq_length=64 if short else 1024, per_token_loss=True, recompute="full"
    )
    cluster = replace(cluster, limits=replace(TWO_ALONE, as_given=("recompute",)))
    problem = make_problem(cluster, workload)
    costs, devices, best = problem.costs, problem.cluster.devices, search(problem).best
    possible = []
    for sizes in product(micro_batch_sizes(costs, 2), repeat=2) if len(devices) == 2 else ():
        for count in range(1, batch):
            other, rest = divmod(batch - count * sizes[0], sizes[1])
            if other < 1 or rest:
                continue
            replicas = [
                PlacedReplica((PlacedStage((device,), 2),), m, micro_batch_size=size)
                for device, m, size in zip(devices, (count, other), sizes, strict=True)
            ]
            cost = costs.placement(Placement(tuple(replicas)))
            if cost.missing_bytes <= 0:
                possible.append(cost.step_time_s)
    assert (best is None) == (not possible)
    if best is not None:
        assert best.step_time_s <= min(possible) * (1 + 1e-9) / (1 - MIN_GAIN)
        assert step_time_bound_s(costs) <= min(possible) * (1 + 1e-9)


NEAR = Link(300e9, 3e-6)
WIDE = make_workload(8, 2048, 2, seq_length=2048)
"""Few micro-batches: pipelines wait, wide groups do not."""


def test_three_gpus_share_eight_heads() -> None:
    """No width of theirs divides the model evenly but 1 and 2."""
    cluster = make_cluster(("a", FAST, 3), inside=NEAR, limits=FREE)
    plan = plan_cluster(cluster, WIDE)
    assert format_layout(plan.layout).startswith("tp3(1:1:1):8")
    validate_plan(plan, cluster)
    held = replace(cluster, limits=replace(FREE, as_given=("shares",)))
    even = plan_cluster(held, WIDE)
    assert plan.estimates is not None and even.estimates is not None
    assert plan.estimates.step_time_s < even.estimates.step_time_s
    assert plan.estimates.bound_s is not None and even.estimates.bound_s is not None
    assert plan.estimates.gap is not None and plan.estimates.gap < 0.05
    assert plan.estimates.bound_s <= even.estimates.bound_s


def test_unlike_gpus_in_one_group_have_the_shares_of_brute_force() -> None:
    limits = replace(FREE, no_tensor_parallel_across=())
    slow = replace(SLOW, memory_bytes=FAST.memory_bytes)
    cluster = make_cluster(("a", FAST, 1), ("b", slow, 1), between=NEAR, limits=limits)
    plan = plan_cluster(cluster, WIDE)
    validate_plan(plan, cluster)
    assert [len(s.devices) for r in plan.replicas for s in r.stages] == [2]
    costs, heads = CostModel(cluster, WIDE), WIDE.model.num_query_groups
    possible = []
    for own in range(1, heads):
        for size in (1, 2):
            stage = PlacedStage(cluster.devices, 8, (own, heads - own))
            replica = PlacedReplica((stage,), 2 // size, micro_batch_size=size)
            possible.append(costs.placement(Placement((replica,))).step_time_s)
    assert plan.estimates is not None
    assert plan.estimates.step_time_s <= min(possible) * (1 + 1e-9)


def test_groups_stay_on_a_node_unless_the_limits_say_otherwise() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 1), between=NEAR, limits=FREE)
    plan = plan_cluster(cluster, WIDE)
    assert all(len(s.devices) == 1 for r in plan.replicas for s in r.stages)


def test_what_comes_out_as_a_plan_of_stock_megatron_is_priced_as_one() -> None:
    """A start with 3 and 1 micro-batches is filled with 2 and 2, which stock Megatron runs; its
    exchange has the final norm in it, which the quick formula leaves out."""
    card = replace(FAST, memory_bytes=100 * 2**20)
    cluster = make_cluster(("n0", card, 1), ("n1", card, 1), between=Link(5e10, 0.0))
    workload = make_workload(1, global_batch_size=4, seq_length=64)
    plan = plan_cluster(cluster, workload)
    assert plan.estimates is not None
    assert plan.estimates.step_time_s == estimate_plan(plan, cluster).step_time_s
    kept = {
        (candidate.placement, candidate.is_stock)
        for candidate in search(make_problem(cluster, workload)).ranking_of_all
    }
    for placement, is_stock in kept:
        assert is_stock or len({r.num_micro_batches for r in placement.replicas}) > 1
