"""How candidates are ranked: a total order that no chance decides."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.division.counts import MIN_GAIN
from megatron_hetero.planner.evaluate.candidate import (
    Candidate,
    has_the_jobs_settings,
    is_plain,
    ranked_time_s,
)
from megatron_hetero.planner.objective import Standing
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

CLUSTER: Cluster = make_cluster(("a", FAST, 2), ("b", FAST, 2), ("c", SLOW, 2))
COSTS = CostModel(CLUSTER, make_workload(num_layers=4, global_batch_size=8))


def replica(*stages: tuple[str, int], number: int = 8) -> PlacedReplica:
    """Stages as (`a01`, layers)."""
    return PlacedReplica(
        tuple(
            PlacedStage(tuple(Device(name[0], int(i)) for i in name[1:]), n) for name, n in stages
        ),
        number,
    )


def candidate(*replicas: PlacedReplica, **more: object) -> Candidate:
    placement = Placement(replicas)
    cost = COSTS.placement(placement)
    return Candidate(placement, cost, "test", **more)  # type: ignore[arg-type]


def with_time(one: Candidate, time_s: float) -> Candidate:
    """The candidate, were its step so long."""
    cost = replace(one.cost, gradient_sync_s=time_s - one.cost.pipelines_s - one.cost.update_s)
    return replace(one, cost=cost)


PIPELINE = candidate(replica(("a0", 2), ("c0", 2)))


def test_a_candidate_is_as_fast_as_its_cost() -> None:
    assert PIPELINE.step_time_s == PIPELINE.cost.step_time_s
    assert not PIPELINE.is_stock and replace(PIPELINE, rank_order="tp-dp-pp").is_stock
    assert PIPELINE.keeps_limits
    assert not replace(PIPELINE, standing=Standing(0.1)).keeps_limits


def test_structure_and_pattern_by_hand() -> None:
    two = candidate(replica(("b01", 2), ("c0", 2), number=4), replica(("a0", 4), number=4))
    assert two.structure == ((("b", 2, 1), ("c", 1, 1)), (("a", 1, 1),))
    assert two.pattern == (((0, 2, 1), (1, 1, 1)), ((2, 1, 1),))
    mirrored = candidate(replica(("a01", 2), ("c0", 2), number=4), replica(("b0", 4), number=4))
    assert mirrored.structure != two.structure
    assert mirrored.pattern == two.pattern
    assert mirrored.step_time_s == two.step_time_s


def test_settings_of_its_own_are_not_plain() -> None:
    own = PIPELINE.placement.replicas[0]
    assert is_plain(PIPELINE.placement)
    counted = Placement((replace(own, launch_counts=(3, 1)),))
    assert not is_plain(counted) and has_the_jobs_settings(counted)
    stage = own.stages[0]
    for changed in (
        replace(own, micro_batch_size=2),
        replace(own, stages=(replace(stage, recompute="full"), *own.stages[1:])),
        replace(own, stages=(replace(stage, shares=(1,)), *own.stages[1:])),
    ):
        assert not is_plain(Placement((changed,)))
        assert not has_the_jobs_settings(Placement((changed,)))


def test_what_the_flags_do_not_say_must_make_up_for_it() -> None:
    own = PIPELINE.placement.replicas[0]
    counted = Placement((replace(own, launch_counts=(3, 1)),))
    assert ranked_time_s(PIPELINE.placement, PIPELINE.cost) == PIPELINE.step_time_s
    ranked_s = ranked_time_s(counted, PIPELINE.cost)
    assert ranked_s == pytest.approx(PIPELINE.step_time_s / (1 - MIN_GAIN))
    assert ranked_s > PIPELINE.step_time_s


def test_keys_go_by_limits_then_objective_then_time() -> None:
    best = with_time(PIPELINE, 1.0)
    ranked = [
        best,
        with_time(PIPELINE, 2.0),
        replace(best, standing=Standing(0.0, 5.0)),
        replace(best, standing=Standing(0.1, 0.0)),
    ]
    for order in permutations(ranked):
        assert sorted(order, key=lambda c: c.key) == ranked
        assert sorted(order, key=lambda c: c.coarse_key) == ranked


def test_of_equal_times_fewer_gpus_then_stock_then_devices() -> None:
    one = with_time(candidate(replica(("a0", 4))), 1.0)
    other = with_time(candidate(replica(("b0", 4))), 1.0)
    stock = with_time(candidate(replica(("b0", 4)), rank_order="tp-dp-pp"), 1.0)
    two = with_time(candidate(replica(("a01", 4)), rank_order="tp-dp-pp"), 1.0)
    ranked = [stock, one, other, two]
    for order in permutations(ranked):
        assert sorted(order, key=lambda c: c.key) == ranked


def test_rounding_decides_nothing() -> None:
    """Seconds that differ in their last digits are equal: fewer GPUs, then layers, then devices."""
    fewer = with_time(candidate(replica(("a0", 4))), 1.0 + 1e-15)
    more = with_time(candidate(replica(("a01", 4))), 1.0)
    assert fewer.step_time_s > more.step_time_s
    assert fewer.coarse_key == more.coarse_key and fewer.key < more.key
    # A difference that is none of rounding still does.
    assert more.key < with_time(fewer, 1.0 + 1e-11).key
    # Layers decide before names, on which a user's plan should not depend.
    first = with_time(candidate(replica(("a0", 3), ("b0", 1))), 1.0)
    second = with_time(candidate(replica(("b0", 1), ("a0", 3))), 1.0)
    assert second.key < first.key


def test_placements_that_differ_in_anything_have_unlike_keys() -> None:
    own = replica(("a0", 2), ("c0", 2))
    changed = [
        own,
        replica(("a0", 3), ("c0", 1)),
        replica(("a0", 2), ("c0", 2), number=4),
        replace(own, launch_counts=(4, 1)),
        replace(own, micro_batch_size=2),
        replace(own, stages=(replace(own.stages[0], recompute="full"), own.stages[1])),
    ]
    keys = {
        replace(PIPELINE, placement=Placement((one,)), standing=Standing()).key[-1].words
        for one in changed
    }
    assert len(keys) == len(changed)


def test_contention_is_the_part_of_the_pipelines_time_for_which_a_path_is_taken() -> None:
    slow = CostModel(
        make_cluster(("a", FAST, 2), ("b", FAST, 2), between=CLUSTER.node_links["a", "b"]),
        COSTS.workload,
    )
    placement = Placement(
        (replica(("a0", 2), ("b0", 2), number=4), replica(("a1", 2), ("b1", 2), number=4))
    )
    both = Candidate(placement, slow.placement(placement), "test")
    longest_s = max(r.pipeline_s for r in both.cost.replicas)
    busy_s = 2 * 4 * both.cost.replicas[0].forward_hops[0].serialisation_s
    assert both.contention == pytest.approx(busy_s / longest_s)
    assert candidate(replica(("a0", 4))).contention == 0.0


def test_counts_are_seen_on_any_replica() -> None:
    own = replica(("a0", 2), ("c0", 2), number=4)
    both = Placement((own, replace(own, launch_counts=(3, 1))))
    assert replace(PIPELINE, placement=both).has_counts
    assert not PIPELINE.has_counts
