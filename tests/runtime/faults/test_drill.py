"""Drills: what the flag takes, and that they happen once, at their place."""

from __future__ import annotations

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.faults import drill as drills
from megatron_hetero.runtime.faults.drill import Drill, arm, parse_drill
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.job.arguments import split_arguments


def test_a_drill_reads_as_it_is_written() -> None:
    drill = parse_drill("kill@3:20:optimizer-step")
    assert drill == Drill("kill", 3, 20, Phase.OPTIMIZER_STEP)
    assert str(drill) == "kill@3:20:optimizer-step"
    assert split_arguments(["--hetero-drill", "spin@0:1:steady"]).faults.drill is not None
    assert split_arguments([]).faults.drill is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("kill", "FAULT@RANK:STEP:PHASE"),
        ("kill@1:2", "FAULT@RANK:STEP:PHASE"),
        ("kill@-1:2:steady", "FAULT@RANK:STEP:PHASE"),
        ("melt@1:2:steady", "no fault 'melt'; kill, freeze, spin, no-space"),
        ("kill@1:2:lunch", "no phase 'lunch'; start, groups"),
        ("kill@1:2:rename", "rank 0 alone"),
        ("no-space@1:2:steady", "nothing is written in steady"),
    ],
)
def test_a_drill_that_cannot_be_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        parse_drill(text)


@pytest.mark.parametrize("flag", ["--hetero-keep-checkpoints=0", "--hetero-stall-limit=1"])
def test_numbers_that_cannot_be_are_refused(flag: str) -> None:
    with pytest.raises(UsageError, match=flag.partition("=")[0]):
        split_arguments([flag])


def test_a_drill_happens_once_on_its_rank_in_its_first_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROGRESS, "_listeners", [])
    happened: list[Drill] = []
    monkeypatch.setattr(drills, "_happen", happened.append)
    drill = Drill("kill", 1, 3, Phase.STEADY)
    with pytest.raises(UsageError, match="ranks 0 to 0"):
        arm(drill, 0, 1)
    arm(drill, 0, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    arm(drill, 1, 2)
    for step in (2, 3, 4):
        PROGRESS.begin_step(step, Phase.STEADY)
    assert happened == []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    arm(drill, 1, 2)
    for phase in (Phase.WARM_UP, Phase.STEADY, Phase.STEADY):
        PROGRESS.begin_step(4, phase)
    assert happened == [drill]
