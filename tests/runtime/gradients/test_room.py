"""The room of a rank, from its plan."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.plan.build import canonical_hosts
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.gradients.room import room_of_rank
from megatron_hetero.schedule.estimate import estimate_plan
from tests.cost.builders import BETWEEN, FAST, SLOW, make_cluster
from tests.runtime.workloads import plan
from tests.schedule.simulator.test_step import placed


def estimated() -> tuple[Plan, dict[tuple[int, int], int]]:
    """A plan with estimates, and the rooms by which it is priced."""
    asked = placed("tp1:4 @2 | tp1:3,tp1:1 @2", ["a:0"], ["b:0", "b:1"])
    cluster = make_cluster(("a", FAST, 4), ("b", SLOW, 4), ("c", SLOW, 4), between=BETWEEN)
    estimates = estimate_plan(asked, cluster, bounded=False)
    hosts = canonical_hosts(asked.replicas, cluster)
    made = replace(asked, hosts=hosts, estimates=estimates)
    costs = CostModel(cluster, made.workload)
    return made, costs.rooms(costs.placement(placement_of(made, cluster)).replicas)


def test_a_rank_has_the_room_by_which_its_plan_is_priced() -> None:
    made, rooms = estimated()
    found = [room_of_rank(made, rank, overlaps=False) for rank in range(3)]
    assert found == [rooms[0, 0], rooms[1, 0], rooms[1, 1]]
    assert made.estimates is not None
    kept = made.estimates.devices["a:0"].parts_bytes["activations"]
    assert found[0] - room_of_rank(made, 0, overlaps=True) == kept > 0


def test_a_layout_knows_of_no_room() -> None:
    assert room_of_rank(plan("tp1:4 @1 | tp1:4 @1"), 0, overlaps=False) == 0
