"""Rounds of an all-reduce with nothing but sums of two holders.

Where two groups meet, each holder adds half of a range for both, and gives the sum of its half
back.  That is an all-reduce of two, for which libraries have one call: as many bytes, as many
messages one after the other, and the same bits, because a + b is b + a.  Among three groups or more
a library's ring hands sums on from one to the next, while rounds wait for one message between any
two; so those stay rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_hetero.exchange.plan import ExchangePlan, Transfer


class PairSum(NamedTuple):
    """A round of adding and a round of copying between two holders: both get the sum of the
    elements `start:stop`."""

    round: int
    holders: tuple[int, int]
    start: int
    stop: int


def pair_sums(plan: ExchangePlan) -> Mapping[int, PairSum]:
    """Return holder -> the holder's sum with a partner, if the last sum in an all-reduce is between
    two.

    A pair that does not halve its range is left out: a library would send other bytes.

    Args:
        plan: one whose chunks are written out, or which has one.
    """
    if plan.purpose != "all_reduce" or not len(plan.table):
        return {}
    # The last round of adding and the first of copying are where two groups meet.
    last = int(plan.table[plan.table[:, 5] == 1, 0].max(initial=-1))
    rows = plan.table[(plan.table[:, 0] == last) | (plan.table[:, 0] == last + 1)]
    # Both directions of a pair are one row; `place` is [transfer] -> its pair.
    ends = np.sort(rows[:, 1:3], axis=1)
    pairs, place = np.unique(ends, axis=0, return_inverse=True)
    # A holder with two partners in these rounds takes part in more than a sum of two.
    num_partners = np.bincount(pairs.ravel(), minlength=plan.num_holders)
    found: dict[int, PairSum] = {}
    for number in np.flatnonzero((num_partners[pairs] == 1).all(axis=1)).tolist():
        of_pair = replace(plan, table=rows[place.reshape(-1) == number]).transfers()
        span = _halved(tuple(of_pair), last)
        if span is not None:
            first, second = pairs[number].tolist()
            found[first] = found[second] = PairSum(last, (first, second), *span)
    return found


def _halved(transfers: Sequence[Transfer], last: int) -> tuple[int, int] | None:
    """Return the range of which two holders sum half each; None if there is none."""
    adds = sorted((t.start, t.stop, t.source) for t in transfers if t.reduces and t.round == last)
    copies = sorted(
        (t.start, t.stop, t.destination) for t in transfers if not t.reduces and t.round == last + 1
    )
    # Two sums there and the same two ranges back; anything else is no all-reduce of two.
    if len(transfers) != 4 or len(adds) != 2 or adds != copies:
        return None
    (start, middle, one), (next_start, stop, other) = adds
    # A library halves the range, give or take the odd element.
    is_one_range = middle == next_start and one != other
    return (start, stop) if is_one_range and abs(middle - start - (stop - middle)) <= 1 else None
