"""Numbers that a ranking compares: without the digits that rounding leaves."""

from __future__ import annotations

from math import inf, isnan, nan

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.rounding import ranked

numbers = st.floats(1e-200, 1e200)


def test_ranked_by_hand() -> None:
    assert ranked(0.1 + 0.2) == ranked(0.3) != 0.1 + 0.2
    assert ranked(0.0) == 0.0 and ranked(inf) == inf and isnan(ranked(nan))
    assert ranked(1.0) < ranked(1.0 + 1e-11)
    assert ranked(-0.3) == -ranked(0.3)


@given(numbers, numbers)
def test_ranked_keeps_orders_and_twelve_digits(one: float, other: float) -> None:
    assert abs(ranked(one) - one) <= 1e-12 * one
    assert ranked(ranked(one)) == ranked(one)
    low, high = sorted((one, other))
    assert ranked(low) <= ranked(high)
