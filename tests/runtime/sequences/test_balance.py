"""The line of the log about dealt steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_hetero.runtime.sequences.balance import (
    Balance,
    balance,
    balance_line,
    slowest_of_each,
)
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


def test_a_note_is_printed_once_with_its_own_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line itself comes only every tenth step."""
    monkeypatch.setattr("megatron.training.get_args", lambda: SimpleNamespace(log_interval=10))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    whole = StepTokens(((GroupTokens(0, (0,), ((4,),), 1.0),),))
    log = Balance([0], [])
    for iteration, note in enumerate(["", "dealt greedily", "", ""], 1):
        with log.measured(RankStep(whole, 1, 4, (), note), forward_only=False):
            pass
        log.observe(iteration, {}, None)
    assert capsys.readouterr().out == " [sequences] iteration        2 | dealt greedily |\n"
