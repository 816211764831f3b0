"""The page of planted errors is what its results say, and names every error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import planted_errors

from megatron_hetero.lab.verify.faults.catalogue import FAULTS


def test_the_page_is_printed_from_the_results() -> None:
    results = json.loads(planted_errors.RESULTS.read_text(encoding="utf-8"))
    assert set(results["errors"]) <= set(FAULTS), "run tools/planted_errors.py run"
    assert planted_errors.PAGE.read_text(encoding="utf-8") == planted_errors.page(results)
    page = planted_errors.page(results)
    assert [name for name in FAULTS if name not in page] == []


def test_an_error_that_nothing_found_is_counted() -> None:
    error = {"found": {"sgd": [], "adam": []}, "since": "2026-11-25"}
    assert not planted_errors.is_found(error)
    assert planted_errors.is_newer(error)
    assert planted_errors.is_found({**error, "found": {"adam": ["loss"]}})
