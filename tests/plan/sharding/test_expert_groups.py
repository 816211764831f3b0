"""Groups of ranks that deal experts out over replicas."""

from __future__ import annotations

import pytest

from megatron_hetero.cost.sync.holders import gradient_holders
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.communication.communicators import model_communicators
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.sharding.expert_groups import expert_groups, expert_peers
from tests.runtime.workloads import MIXTRAL_LIKE, workload


def plan(text: str) -> Plan:
    return plan_from_layout(parse_layout(text))


def test_alike_stages_come_together_whatever_stands_between_and_behind_them() -> None:
    made = plan("tp1ep2:3,tp2:1 @3 | tp2:4 @1 | tp1ep2:3,tp1:1 @3")
    assert expert_peers(made) == {(0, 0): (0, 2), (2, 0): (0, 2)}
    (group,) = expert_groups(made)
    assert (group.ranks, group.dealt, group.divided) == ((0, 5), ((0, 5),), ((0,), (5,)))
    assert [group.place(rank) for rank in group.ranks] == [(0, 0), (1, 0)]
    assert group.copy == 0


def test_as_many_stages_as_make_a_group_and_no_more() -> None:
    made = plan(" | ".join(["tp1ep2:4 @1"] * 4))
    assert [(group.ranks, group.copy) for group in expert_groups(made)] == [
        ((0, 1), 0),
        ((2, 3), 2),
    ]
    inside = plan("tp4ep1etp2:4 @2 | tp2:4 @2")
    assert [(group.ranks, group.copy) for group in expert_groups(inside)] == [
        ((0, 1), 0),
        ((2, 3), 2),
    ]


def test_ranks_that_divide_an_expert_lie_beside_each_other() -> None:
    (group,) = expert_groups(plan("tp2ep2etp2:4 @2 | tp2ep2etp2:4 @2"))
    assert (group.dealt, group.divided) == (((0, 2), (1, 3)), ((0, 1), (2, 3)))


@pytest.mark.parametrize(
    "other",
    ["tp1ep2:2,tp2:2 @3", "tp1ep2:3,tp2:1 @2", "tp2ep2etp1:3,tp2:1 @3", "tp1:3,tp2:1 @3"],
)
def test_a_stage_that_finds_none_like_it_is_refused(other: str) -> None:
    with pytest.raises(PlanFormatError, match=r"stage 0 .* over 2 replicas.* an equal stage 0"):
        plan(f"tp1ep2:3,tp2:1 @3 | {other}")


def test_stages_of_unlike_launch_counts_are_not_in_step() -> None:
    plan("tp1ep2:2,tp1:2 @2 | tp1ep2:2,tp1:1,tp1:1 @2")
    with pytest.raises(PlanFormatError, match="order of passes"):
        plan("tp1ep2:2,tp1:2 @3 | tp1ep2:2,tp1:1,tp1:1 @3")


def test_a_group_has_communicators_unless_its_stage_has_them() -> None:
    made = plan("tp2ep2etp2:3,tp1:1 @3 | tp2ep2etp2:3,tp2:1 @3")
    found = [one.ranks for one in model_communicators(made) if one.use == "experts"]
    # Those that divide an expert are the stages' own groups.
    assert found == [(0, 1, 3, 4), (0, 3), (1, 4)]


def test_an_expert_is_reduced_among_its_holders_alone() -> None:
    job = workload(**MIXTRAL_LIKE)
    holders = gradient_holders(plan("tp1ep2:4 @2 | tp1ep2:4 @2 | tp2:4 @2"), job)
    # Ranks 0 and 1 hold two of four experts each; ranks 2 and 3 a half of every one.
    assert {(0, 2), (0, 3), (1, 2), (1, 3)} <= set(holders)
    alone = gradient_holders(plan("tp1ep2:4 @2 | tp1ep2:4 @2"), job)
    assert set(alone) == {(0, 1)}
