"""What the runtime refuses is what the planner leaves alone."""

from __future__ import annotations

from megatron_hetero.cost import choices
from megatron_hetero.flags.support.of_plan import NOT_WITH_CHUNKS, NOT_WITH_CONTEXT_PARALLEL
from megatron_hetero.schedule.choice import ruled_out


def test_the_planner_knows_every_flag_that_context_parallelism_refuses() -> None:
    refused = {flag for rule, _, _ in NOT_WITH_CONTEXT_PARALLEL for flag in rule.split(" / ")}
    assert refused == choices.NOT_WITH_CONTEXT_PARALLEL


def test_no_chunks_are_made_for_what_the_start_refuses() -> None:
    refused = {flag for rule, _, _ in NOT_WITH_CHUNKS for flag in rule.split(" / ")}
    assert refused == set(ruled_out._NOT_IN_CHUNKS)
