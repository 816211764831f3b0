"""The space of plans for which the bound holds: what is outside of it, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.bounds.space import has_every_plan, relaxed, why_outside
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from tests.cost.builders import AS_GIVEN, CLUSTER, FAST, FREE, SLOW, make_cluster, make_workload

STAGES = PlacedReplica(
    (PlacedStage((Device("a", 0),), 2), PlacedStage((Device("b", 0),), 2)), num_micro_batches=4
)


@pytest.mark.parametrize(
    ("replica", "why"),
    [
        (STAGES, None),
        (replace(STAGES, launch_counts=(3, 1)), None),
        (replace(STAGES, launch_counts=(1, 1)), "fewer forwards than 1F1B"),
        (replace(STAGES, num_micro_batches=2, micro_batch_size=2), "micro-batches of 2"),
        (
            PlacedReplica((PlacedStage((Device("a", 0), Device("a", 1)), 4, (2, 1)),), 4),
            "a group of shares of unlike sizes",
        ),
        (PlacedReplica((PlacedStage((Device("a", 0), Device("b", 0)), 4),), 4), "several nodes"),
        (
            PlacedReplica(
                (PlacedStage((Device("a", 0), Device("a", 1)), 4, context_parallel=2),), 4
            ),
            "context parallelism",
        ),
        (
            PlacedReplica(
                (PlacedStage((Device("a", 0),), 4, None, "full", recompute_num_layers=1),), 4
            ),
            "recompute that is not the job's",
        ),
    ],
)
def test_plans_that_the_search_does_not_make_have_no_bound(
    replica: PlacedReplica, why: str | None
) -> None:
    costs = CostModel(CLUSTER, make_workload())
    placement = Placement((replica,))
    found = why_outside(costs, placement, costs.placement(placement))
    assert found is None if why is None else found is not None and why in found


def test_limits_leave_plans_outside_of_the_bound() -> None:
    placement = Placement((STAGES,))
    for limits, why in (
        (replace(AS_GIVEN, num_replicas=2), "limits.num_replicas is 2"),
        (replace(AS_GIVEN, idle_devices=("b:0",)), "b:0, which the limits keep idle"),
    ):
        costs = CostModel(replace(CLUSTER, limits=limits), make_workload())
        found = why_outside(costs, placement, costs.placement(placement))
        assert found is not None and why in found
    free = CostModel(replace(CLUSTER, limits=FREE), make_workload())
    both = Placement((replace(STAGES, num_micro_batches=2, micro_batch_size=2),))
    assert why_outside(free, both, free.placement(both)) is None
    tiny = make_cluster(("a", replace(FAST, memory_bytes=1 << 20), 1), ("b", SLOW, 1))
    costs = CostModel(tiny, make_workload())
    assert why_outside(costs, placement, costs.placement(placement)) == "it does not fit"


def test_wider_spaces_have_what_the_narrow_one_leaves_out() -> None:
    """Divided sequences are in two spaces, groups over nodes and in unlike shares in one."""
    costs = CostModel(replace(CLUSTER, limits=FREE), make_workload())
    both = (Device("a", 0), Device("a", 1))
    divided = PlacedStage(both, 4, context_parallel=2)
    over_nodes = PlacedStage((Device("a", 0), Device("b", 0)), 4)
    unlike = PlacedStage(both, 4, (2, 1))
    for stage, own in ((divided, True), (over_nodes, False), (unlike, False)):
        placement = Placement((PlacedReplica((stage,), 4),))
        cost = costs.placement(placement)
        assert why_outside(costs, placement, cost) is not None
        assert (why_outside(costs, placement, cost, divided=True) is None) == own
        assert why_outside(costs, placement, cost, free_groups=True) is None
    unequal = Placement((PlacedReplica((replace(divided, context_shares=(3, 1)),), 4),))
    found = why_outside(costs, unequal, costs.placement(unequal), free_groups=True)
    assert found == "unlike shares of sequences"


def test_the_search_keeps_to_the_space_where_groups_do() -> None:
    def all_there(limits: Limits, cluster: Cluster = CLUSTER) -> bool:
        return has_every_plan(CostModel(replace(cluster, limits=limits), make_workload()))

    crosses = replace(FREE, no_tensor_parallel_across=())
    assert all_there(FREE) and not all_there(crosses)
    assert all_there(replace(crosses, as_given=("shares",)))
    islands = make_cluster(("a/0", FAST, 2), ("a/1", SLOW, 2))
    assert not all_there(FREE, islands) and all_there(AS_GIVEN, islands)


@pytest.mark.parametrize("pattern", [(), (0, 1, 1, 0)], ids=["experts alone", "dense beside"])
@pytest.mark.parametrize("limits", [FREE, AS_GIVEN], ids=["dealt or divided", "divided"])
def test_no_layer_of_any_kind_is_cheaper_than_the_relaxed_one(
    limits: Limits, pattern: tuple[int, ...]
) -> None:
    """Of layers of many narrow experts, which are faster dealt out, and of dense ones."""
    job = make_workload(
        hidden_size=1024,
        seq_length=4096,
        num_experts=32,
        moe_router_topk=8,
        moe_ffn_hidden_size=512,
        moe_layer_freq=pattern,
        sequence_parallel=True,
    )
    costs = CostModel(make_cluster(("a", FAST, 4), limits=limits), job)
    tables = (None, (1,) * 4) if limits is FREE else (None,)
    kinds_s = []
    for table in tables:
        stage = PlacedStage(costs.cluster.devices, 4, expert_shares=table)
        pieces = costs.stage_pieces(stage, 1024)
        kinds_s += [kind.layer.total_s for kind in pieces.kinds or (pieces,)]
    least_s = relaxed(costs).pieces(costs.cluster.nodes[0], 4, 1024).layer.total_s
    assert least_s <= min(kinds_s) * (1 + 1e-12)
    if not pattern:
        assert least_s == pytest.approx(min(kinds_s))
