"""The order in which a rank trains in groups."""

from __future__ import annotations

from megatron_hetero.runtime.sequences.groups import GroupPlace
from megatron_hetero.runtime.sequences.steps import own_groups
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens

PAIR = GroupTokens(0, (0,), ((3, 1),), 2.0)
LONG, SHORT, OTHER = (GroupTokens(r, (k,), ((4,),), s) for r, k, s in ((0, 1, 4.0), (0, 2, 1.0),
                                                                       (2, 3, 1.0)))  # fmt: skip


def place(replica: int, num_stages: int) -> GroupPlace:
    return GroupPlace(replica, 4, num_stages, {})


def test_pipelines_in_groups_run_every_micro_batch() -> None:
    step = StepTokens(((LONG, OTHER), (PAIR,), (SHORT,)))
    assert own_groups(step, place(0, 2)) == [LONG, PAIR, SHORT]
    assert own_groups(step, place(1, 2)) == [None, PAIR, None]
    assert own_groups(step, place(3, 2)) == [None, None, None]


def test_whole_models_run_their_own_micro_batches() -> None:
    step = StepTokens(((LONG, OTHER), (PAIR,), (SHORT,)))
    assert own_groups(step, place(0, 1)) == [LONG, PAIR, SHORT]
    assert own_groups(step, place(1, 1)) == [PAIR]
    assert own_groups(step, place(3, 1)) == [None]


def test_pipelines_on_their_own_go_from_short_to_long() -> None:
    step = StepTokens(((LONG, OTHER), (SHORT,)))
    assert own_groups(step, place(0, 3)) == [SHORT, LONG]
    assert own_groups(step, place(0, 1)) == [LONG, SHORT]
    assert own_groups(step, place(3, 3)) == [None]
