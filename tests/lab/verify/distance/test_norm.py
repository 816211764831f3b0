"""A gradient norm is held to the one process's, and to its exact value."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from megatron_hetero.lab.verify.distance.norm import norm_distance, norm_span


def recorded(printed: float, *gradients: float) -> Any:
    """Return a record of one step with tensors of one number each."""
    names = [f"tensor{i}" for i in range(len(gradients))]
    return SimpleNamespace(
        norms={1: printed.hex()},
        shards=dict.fromkeys(names),
        arrays={
            f"gradient/1/{name}": numpy.array([gradient], numpy.float32)
            for name, gradient in zip(names, gradients, strict=True)
        },
    )


@pytest.mark.parametrize("printed", [5.0 - 2e-5, 5.0 + 2e-5])
def test_norms_between_the_printed_and_the_exact_one_are_equal(printed: float) -> None:
    span = norm_span(recorded(printed, 3.0, 4.0), 1)
    assert span == (min(printed, 5.0), max(printed, 5.0))
    assert norm_distance(5.0, span) == norm_distance(printed, span) == 0
    assert norm_distance((printed + 5.0) / 2, span) == 0
    assert norm_distance(span[1] * 1.001, span) == pytest.approx(1e-3)
    assert norm_distance(span[0] * 0.999, span) == pytest.approx(1e-3)


def test_a_norm_that_is_not_of_these_gradients_counts_as_it_is_printed() -> None:
    span = norm_span(recorded(5.001, 3.0, 4.0), 1)
    assert span == (5.001, 5.001)
    assert norm_distance(5.0, span) == pytest.approx(2e-4, rel=1e-2)


def test_no_number_is_a_distance() -> None:
    assert math.isnan(norm_distance(math.nan, (1.0, 2.0)))
    assert norm_span(recorded(math.nan, 3.0), 1) == pytest.approx((math.nan, math.nan), nan_ok=True)
    assert norm_distance(0.5, (0.0, 0.0)) == 0.5
