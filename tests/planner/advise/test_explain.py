"""Why a plan is what it is: parts that sum to the step, and what binds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.advise.explain import Explanation, explain_candidate, explain_plan
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload, place

CLUSTER = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
WORKLOAD = make_workload(num_layers=6, global_batch_size=8, seq_length=1024)
PROBLEM = make_problem(CLUSTER, WORKLOAD)


def replica(*stages: tuple[str, int], number: int = 8) -> PlacedReplica:
    return PlacedReplica(
        tuple(
            PlacedStage(tuple(Device(name[0], int(i)) for i in name[1:]), n) for name, n in stages
        ),
        number,
    )


def explained(*replicas: PlacedReplica) -> tuple[Explanation, Candidate]:
    placement = Placement(replicas)
    candidate = Candidate(placement, PROBLEM.costs.placement(placement), "given")
    return explain_candidate(PROBLEM, Scoreboard(PROBLEM), candidate), candidate


def layouts() -> st.SearchStrategy[tuple[PlacedReplica, ...]]:
    cuts = st.integers(1, 5)
    return st.one_of(
        cuts.map(lambda n: (replica(("a0", n), ("b0", 6 - n)),)),
        cuts.map(lambda n: (replica(("a01", n), ("b01", 6 - n)),)),
        cuts.map(
            lambda n: (replica(("a0", n), ("a1", 6 - n), number=5), replica(("b01", 6), number=3))
        ),
    )


@settings(max_examples=15)
@given(layouts())
def test_parts_of_the_time_sum_to_the_step(replicas: tuple[PlacedReplica, ...]) -> None:
    found, candidate = explained(*replicas)
    parts = found.time_by_cause
    own = (
        parts.compute_s,
        parts.tensor_parallel_s,
        parts.boundary_s,
        parts.waiting_s,
        parts.gradient_sync_s,
        parts.update_s,
    )
    assert sum(own) == pytest.approx(candidate.step_time_s)
    assert min(own) >= -1e-12
    assert found.step_time_s == candidate.step_time_s


@settings(max_examples=15)
@given(layouts())
def test_the_binding_stage_is_the_slowest_of_the_last_replica(
    replicas: tuple[PlacedReplica, ...],
) -> None:
    found, candidate = explained(*replicas)
    ends_s = [r.pipeline_s for r in candidate.cost.replicas]
    assert ends_s[found.binding.replica] == max(ends_s)
    stages = candidate.cost.replicas[found.binding.replica].stages
    times_s = [stage.times.total_s for stage in stages]
    assert found.binding.time_s == times_s[found.binding.stage] == max(times_s)
    placed = replicas[found.binding.replica].stages[found.binding.stage]
    assert found.binding.devices == tuple(device.name for device in placed.devices)


def test_one_gpu_by_hand() -> None:
    """Eight micro-batches on one stage: nothing is waited for, and nothing sent."""
    found, candidate = explained(replica(("a0", 6)))
    stage = candidate.cost.replicas[0].stages[0]
    parts = found.time_by_cause
    assert parts.compute_s == pytest.approx(8 * stage.times.total_s)
    assert parts.tensor_parallel_s == parts.boundary_s == parts.gradient_sync_s == 0.0
    assert parts.waiting_s == pytest.approx(0.0)
    assert found.binding.devices == ("a:0",)


def test_headroom_is_what_each_device_has_left() -> None:
    found, candidate = explained(replica(("a01", 4), ("b0", 2)))
    assert set(found.headroom_bytes) == {"a:0", "a:1", "b:0"}
    first, second = candidate.cost.replicas[0].stages
    assert found.headroom_bytes["a:0"] == found.headroom_bytes["a:1"] == -first.missing_bytes
    assert found.headroom_bytes["b:0"] == -second.missing_bytes > 0


def test_hops_that_launch_counts_hide() -> None:
    far = make_cluster(("a", FAST, 2), ("b", SLOW, 2), between=Link(1e9, 3e-3))
    problem = make_problem(far, WORKLOAD)
    own = replica(("a0", 2), ("a1", 2), ("b0", 2))
    ahead = Placement((replace(own, launch_counts=(7, 6, 1)),))
    candidate = Candidate(ahead, problem.costs.placement(ahead), "given")
    (hop,) = explain_candidate(problem, Scoreboard(problem), candidate).hidden_hops
    assert (hop.replica, hop.boundary) == (0, 1)  # the slow hop is behind stage 1
    assert (hop.launch_counts, hop.own_launch_counts) == ((7, 6, 1), (3, 2, 1))
    size = 1024 * 512 * 2
    assert hop.round_trip_s == pytest.approx(2 * (size / 1e9 + 3e-3))
    assert hop.own_pipeline_s > hop.pipeline_s == candidate.cost.replicas[0].pipeline_s
    assert hop.period_s == max(s.times.total_s for s in candidate.cost.replicas[0].stages)
    assert explained(own)[0].hidden_hops == ()


def test_a_given_plan_is_explained_beside_a_search() -> None:
    plan = place("tp1:3,tp1:3 @8", WORKLOAD, CLUSTER)
    found = explain_plan(plan, CLUSTER, strategies=[Constructive()])
    assert found.num_priced > 10
    assert found.binding.devices[0] in ("a:0", "a:1")
    assert found.best_stock is not None
    assert not found.interrupted and found.outcome is None
    assert found.idle_reasons == plan.idle_reasons


def test_a_plan_without_a_model_cannot_be_explained() -> None:
    plan = replace(place("tp1:3,tp1:3 @8", WORKLOAD, CLUSTER), workload=None)
    with pytest.raises(UsageError, match="give the model"):
        explain_plan(plan, CLUSTER)


@settings(max_examples=15)
@given(layouts())
def test_causes_of_every_stage_sum_to_its_time(replicas: tuple[PlacedReplica, ...]) -> None:
    found, candidate = explained(*replicas)
    costs = [stage for replica in candidate.cost.replicas for stage in replica.stages]
    assert [s.time_s for s in found.stage_times] == [s.times.total_s for s in costs]
    for stage, cost in zip(found.stage_times, costs, strict=True):
        assert stage.causes.total_s == pytest.approx(stage.time_s)
        # `tensor_parallel_s` is of layers alone.
        assert stage.causes.communication_s >= cost.tensor_parallel_s * (1 - 1e-9)
        assert (stage.causes.communication_s > 0) == (cost.tensor_parallel_s > 0)
