"""Verdicts of single checks, on figures by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hetero.lab.kit.forecast import Forecast
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.kit.verdicts import equality_verdict, judged


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


def equality(**unequal: str | None) -> dict[str, Any]:
    keys = ("loss", "gradients", "gradient_norm", "weights")
    return {
        **dict.fromkeys(keys, 1e-7),
        "tolerance": dict.fromkeys(keys, 1e-6),
        "ok": not any(unequal.values()),
        "unequal_initial_weights": None,
        "unequal_holders": None,
        **unequal,
    }


def test_a_verdict_names_the_weight_that_ranks_do_not_have_alike() -> None:
    """Distances within all bounds say nothing of it."""
    assert equality_verdict(equality()).what == "loss differ by 1.0e-07, 1.0e-06 allowed"
    held = equality_verdict(equality(unequal_holders="a.weight, step 1, rank 2"))
    assert not held.ok and "unlike bits: a.weight, step 1, rank 2" in held.what
    started = equality_verdict(equality(unequal_initial_weights="a.weight, rank 2"))
    assert not started.ok and "unequal initial weights of a.weight, rank 2" in started.what
