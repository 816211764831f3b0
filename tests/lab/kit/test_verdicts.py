"""Verdicts of single checks, on figures by hand."""

from __future__ import annotations

import pytest

from megatron_hetero.lab.kit.forecast import Forecast
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.kit.verdicts import judged


@pytest.mark.parametrize(
    ("held", "step_s", "is_planted", "ok"),
    [
        (1000, 1.0, False, True),
        (1029, 1.2, False, True),
        (1031, 1.0, False, False),  # more is held than was predicted
        (1000, 1.0, True, False),  # nine tenths are predicted
        (1000, 1.3, False, False),
        (1000, 0.7, False, False),
    ],
)
def test_a_forecast_holds_or_not(held: int, step_s: float, is_planted: bool, ok: bool) -> None:
    found = judged(Forecast(1000, held, 1.0, step_s, None, {}), Machine("A100", 1), is_planted)
    assert found.ok == ok
    assert ("too little is predicted" in found.what) == (held > 1030 or is_planted)
