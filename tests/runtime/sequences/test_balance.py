"""The line of the log about dealt steps."""

from __future__ import annotations

from megatron_hetero.runtime.sequences.balance import balance, balance_line, slowest_of_each
from megatron_hetero.runtime.sequences.steps import RankStep
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens


def test_the_line_has_predicted_and_real_balance() -> None:
    pair = GroupTokens(0, (0,), ((3, 1),), 1.0)
    steps = [RankStep(StepTokens(((pair,),)), 1, 4, ())] * 2
    line = balance_line(steps, [4.0, 2.0, 0.0], [2.0, 2.0, 1.0])
    assert line == (
        "2 sequences, 8 tokens | groups of the last step: 1x2 | busiest over mean: 2.00, predicted "
        "1.20 | busiest: 2 s a step, predicted 1 s"
    )
    assert balance([1.0, 1.0]) == 1.0


def test_a_replica_is_busy_as_long_as_its_busiest_rank() -> None:
    assert slowest_of_each([1.0, 3.0, 2.0, 4.0], [0, 0, 2, 1]) == [3.0, 4.0, 2.0]
