"""Comparisons of floats that ignore differences left by rounding.

Two ways to add up the same seconds or bytes differ in their last digits, some 1e-16 of the result
for each operation.  Nothing that a user can notice is as small as `ROUNDING`.
"""

from __future__ import annotations

from math import frexp, isfinite, ldexp

ROUNDING = 1e-9
"""Relative difference up to which two numbers count as equal."""


def at_most(value: float, limit: float) -> bool:
    """Return whether `value` is no more than `limit`, but for rounding; neither is negative."""
    return value <= limit * (1 + ROUNDING)


def below(value: float, other: float) -> bool:
    """Return whether `value` is less than `other` by more than rounding; neither is negative."""
    return value < other * (1 - ROUNDING)


def ranked(number: float) -> float:
    """Return a number with 40 binary digits, about 12 decimal ones: what a ranking compares.

    Of equal plans the last digits of the seconds may differ, where nodes are called or added up
    otherwise; then the ranking goes on to what comes after the seconds.
    """
    if not isfinite(number):
        return number
    mantissa, exponent = frexp(number)
    return ldexp(round(ldexp(mantissa, 40)), exponent - 40)
