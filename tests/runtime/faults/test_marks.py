"""Phases of a step: where warm-up ends and cool-down begins, in our programmes and in stock's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.training import global_vars

from megatron_hetero.runtime.faults import marks
from megatron_hetero.runtime.faults.marks import (
    after_a_step,
    finishing_gradients,
    programme_phases,
    stock_forwards,
)
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase, Stamp
from megatron_hetero.schedule.of_plan import operations, order_of
from megatron_hetero.schedule.programme import build_schedule

LETTERS = {Phase.WARM_UP: "w", Phase.STEADY: "s", Phase.COOL_DOWN: "c", Phase.VALIDATION: "v"}


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stamp]]:
    """The stamps from here on; at the end the process is where it was."""
    found: list[Stamp] = []
    monkeypatch.setattr(PROGRESS, "_listeners", [found.append])
    monkeypatch.setattr(PROGRESS, "current", PROGRESS.current)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(curr_iteration=4))
    yield found


def phases_of(order: str, letters: str = "FBIW") -> str:
    """The phases of an order's computations on one stage, a letter for each."""
    programme = build_schedule([operations(order)], order.count("F")).programmes[0]
    assert order_of(programme) == order
    found = programme_phases(programme)
    assert [len(own) for own in found] == [len(instruction) for instruction in programme]
    flat = [phase for own in found for phase in own]
    return "".join(LETTERS[phase] for phase in flat[: len(order)])


@pytest.mark.parametrize(
    ("order", "phases"),
    [
        ("FFFBFBBB", "wwwssccc"),
        ("FBFBFB", "wssssc"),
        ("FFFBBB", "wwwccc"),
        ("FFIFIWWIW", "wwssccccc"),
        ("FFF", "vvv"),
    ],
)
def test_phases_by_hand(order: str, phases: str) -> None:
    assert phases_of(order) == phases


@given(st.integers(1, 9), st.integers(1, 9))
def test_phases_never_go_back(num_micro_batches: int, launched: int) -> None:
    ahead = min(launched, num_micro_batches)
    order = "F" * ahead + "BF" * (num_micro_batches - ahead) + "B" * ahead
    found = phases_of(order)
    assert found == "".join(sorted(found, key="wsc".index))
    assert found.count("w") == ahead and found.count("c") == ahead


def test_the_exchange_of_gradients_and_the_update_have_stamps_around_them(
    stamps: list[Stamp],
) -> None:
    def finalize(*given: Any, **named: Any) -> str:
        assert PROGRESS.current.phase == Phase.GRADIENT_SYNC
        return f"{given} {named}"

    assert finishing_gradients(finalize)(1, a=2) == "(1,) {'a': 2}"
    after_a_step(9, {}, None)
    assert [(s.phase, s.step) for s in stamps[1:]] == [
        (Phase.OPTIMIZER_STEP, stamps[0].step),
        (Phase.BETWEEN_STEPS, 9),
    ]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stock_stages_are_stamped_as_1f1b_runs_them(
    stage: int, stamps: list[Stamp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three stages and four micro-batches, twice; then validation, which has no phases."""
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 3)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: stage)
    monkeypatch.setattr(marks, "get_num_microbatches", lambda: 4)
    forward = stock_forwards(lambda *given: given)
    for _ in range(2):
        stamps.clear()
        assert [forward(k) for k in range(4)] == [(0,), (1,), (2,), (3,)]
        seen = "".join(LETTERS[stamp.phase] for stamp in stamps)
        warm = 2 - stage
        assert seen == "w" + "w" * max(warm - 1, 0) + "s" * (3 - max(warm - 1, 0)) + "c"
        assert {stamp.step for stamp in stamps} == {5}
    stamps.clear()
    with torch.no_grad():
        forward(0)
    assert [stamp.phase for stamp in stamps] == [Phase.VALIDATION]
