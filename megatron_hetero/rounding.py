"""Comparisons of floats that ignore what rounding leaves between numbers that are equal.

Two ways to add up the same seconds or bytes differ in their last digits, some 1e-16 of the result
for each operation.  Nothing that a user can notice is as small as `ROUNDING`.
"""

from __future__ import annotations

ROUNDING = 1e-9
"""Part of a number by which it may be off and still count as the same."""


def at_most(value: float, limit: float) -> bool:
    """Return whether `value` is no more than `limit`, but for rounding; neither is negative."""
    return value <= limit * (1 + ROUNDING)


def below(value: float, other: float) -> bool:
    """Return whether `value` is less than `other` by more than rounding; neither is negative."""
    return value < other * (1 - ROUNDING)
