"""Placements read out of plans, and states that replicas divide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import (
    PlacedReplica,
    PlacedStage,
    Placement,
)
from megatron_hetero.cost.placing import placement_of, with_optimizer_shares
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from tests.cost.builders import CLUSTER, FAST, make_cluster, make_workload, place

WORKLOAD = make_workload(num_layers=4)


def stages(*layers: int, node: str = "a") -> tuple[PlacedStage, ...]:
    return tuple(PlacedStage((Device(node, i),), n) for i, n in enumerate(layers))


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, list[list[int | None]]]:
    """Replicas of six layers, cut anywhere, and shares of the optimizer."""
    replicas, shares = [], []
    for index in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, 5), max_size=3)))
        layers = [b - a for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
        replicas.append(PlacedReplica(stages(*layers, node="abc"[index]), 4))
        shares.append([draw(st.one_of(st.none(), st.integers(1, 5))) for _ in layers])
    return Placement(tuple(replicas)), shares


def test_a_plan_is_read_as_it_is_written() -> None:
    placement = placement_of(place("tp2:4 @3 | tp1:1,tp1:3 @1", WORKLOAD), CLUSTER)
    one, other = placement.replicas
    assert [s.num_layers for s in one.stages] == [4]
    assert one.stages[0].devices == (Device("a", 0), Device("a", 1))
    assert [(s.devices[0].name, s.num_layers) for s in other.stages] == [("b:0", 1), ("b:1", 3)]
    assert (one.num_micro_batches, other.num_micro_batches) == (3, 1)
    assert other.launch_counts is None  # 1F1B's own
    assert all(s.state_parts is None for r in placement.replicas for s in r.stages)


def test_launch_counts_of_a_plan_are_read_where_they_are_not_1f1bs() -> None:
    plan = place("tp1:2,tp1:2 @4", WORKLOAD)
    (replica,) = plan.replicas
    counted = [
        replace(s, num_launched_forwards=n) for s, n in zip(replica.stages, (4, 1), strict=True)
    ]
    ahead = replace(plan, replicas=(replace(replica, stages=tuple(counted)),))
    assert placement_of(ahead, CLUSTER).replicas[0].launch_counts == (4, 1)
    assert placement_of(plan, CLUSTER).replicas[0].launch_counts is None


def test_plans_that_cannot_be_priced_are_refused() -> None:
    bare = plan_from_layout(parse_layout("tp1:4 @4"), WORKLOAD)
    with pytest.raises(PlanFormatError, match="replica 0, stage 0 names no devices"):
        placement_of(bare, CLUSTER)
    plan = place("tp1:2,tp1:2 @4", WORKLOAD)
    with pytest.raises(PlanFormatError, match="a:1, which the cluster does not have"):
        placement_of(plan, make_cluster(("a", FAST, 1)))


@given(placements())
def test_states_of_every_layer_are_kept_once(
    case: tuple[Placement, list[list[int | None]]],
) -> None:
    placement, shares = case
    made = with_optimizer_shares(placement, shares)
    # Layers on average over a stage: weighted by its layers they sum to all six.
    layers = head = embedding = tied = 0.0
    for replica in made.replicas:
        for s, stage in enumerate(replica.stages):
            assert stage.state_parts is not None
            of_layers, of_tied, of_embedding, of_head = stage.state_parts
            assert 0 < of_layers <= 1
            layers += of_layers * stage.num_layers
            is_first, is_last = s == 0, s == len(replica.stages) - 1
            embedding += of_embedding * is_first
            head += of_head * is_last
            tied += of_tied * (is_first or is_last)
    assert layers == pytest.approx(6.0)
    assert (embedding, head, tied) == pytest.approx((1.0, 1.0, 1.0))


def test_shares_of_the_optimizer_by_hand() -> None:
    """Two replicas of one stage, 3 to 1."""
    both = Placement((PlacedReplica(stages(6), 2), PlacedReplica(stages(6, node="b"), 2)))
    made = with_optimizer_shares(both, [[3], [None]])
    assert [r.stages[0].state_parts for r in made.replicas] == [(0.75,) * 4, (0.25,) * 4]
    assert [r.stages[0].optimizer_share for r in made.replicas] == [3, None]


def test_each_context_parallel_group_keeps_a_part() -> None:
    stage = PlacedStage((Device("a", 0), Device("a", 1)), 6, context_parallel=2)
    made = with_optimizer_shares(Placement((PlacedReplica((stage,), 2),)), [[None]])
    assert made.replicas[0].stages[0].state_parts == (0.5,) * 4
