"""Helix's artifact beside our simulator: prices by hand, and what was seen."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from megatron_hetero.serving.prices.work import StepWork
from megatron_hetero.serving.workload.requests import Request
from tools.referees.helix import (
    ACTIVATION_BYTES,
    COPIED_S,
    StepTables,
    _numbers,
    between,
    decoded_per_s,
)

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "serving-helix.json"
PROMPTS, DECODE = ((0, 0.0), (100, 2.0)), ((0, 0.0), (4, 1.0), (8, 3.0))


def test_a_step_is_the_tables_of_all_stages_and_its_hops() -> None:
    assert between(DECODE, 6) == 2.0 and between(DECODE, 8) == 3.0
    step_s, next_s = StepTables([(PROMPTS, DECODE, 2), (PROMPTS, DECODE, 3)]).times(
        StepWork(54.0, 5.0, 1275.0, 400.0)
    )
    # Four requests decode beside a prompt of 50 tokens.
    moved = 54 * ACTIVATION_BYTES
    assert next_s == pytest.approx(3 * 2.0 + moved * COPIED_S)
    assert step_s == pytest.approx(5 * 2.0 + 2 * moved * COPIED_S + moved / 1e9 + 3e-3)


def test_decoded_tokens_are_those_behind_the_first() -> None:
    price = StepTables([(PROMPTS, ((0, 0.0), (8, 0.0)), 1)])
    requests = [Request(0.0, 0, 100, 11)]
    found = decoded_per_s((price, 1600), 1, requests, 1, (0.0, 10.0))
    assert found == pytest.approx(1.0)


def test_no_objects_are_built_from_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([1, 2.5]))
    (tmp_path / "b.pkl").write_bytes(pickle.dumps([Path("x")]))
    assert _numbers(tmp_path / "a.pkl") == [1, 2.5]
    with pytest.raises(pickle.UnpicklingError, match="only lists of numbers"):
        _numbers(tmp_path / "b.pkl")


def test_what_was_seen_keeps_the_bars() -> None:
    told = json.loads(RESULT.read_text(encoding="utf-8"))
    assert len(told["tokens_per_s"]) == 4
    for row in told["tokens_per_s"].values():
        assert abs(row["over_simulated"]) <= 0.10
        assert abs(row["over_real"]) <= 0.15
