"""Shares of a sequence for unlike members."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from megatron_hetero.errors import InfeasiblePlanError, PlanFormatError
from megatron_hetero.sequences.price.shares import (
    balanced_shares,
    pairs_per_token,
    whole_shares,
)


def test_shares_are_those_of_exhaustive_search() -> None:
    """Up to 4 members and 24 tokens: after rounding, at most one token's time above the best."""
    chance = random.Random(5)
    for _ in range(60):
        count, length = chance.randint(2, 4), chance.randint(6, 24)
        costs = [chance.uniform(0.5, 3) for _ in range(count)]
        caps = [chance.randint(2, length) for _ in range(count)]
        best = min(
            (
                max(n * c for n, c in zip(split, costs, strict=True))
                for split in product(*(range(cap + 1) for cap in caps))
                if sum(split) == length
            ),
            default=None,
        )
        shares = balanced_shares(
            np.array(costs)[:, None], np.array(caps, float)[:, None], np.array([float(length)])
        )[:, 0]
        if best is None:
            assert np.isnan(shares).all()
            continue
        assert shares.sum() == pytest.approx(length) and (shares <= np.array(caps) + 1e-9).all()
        slowest = max(n * c for n, c in zip(shares, costs, strict=True))
        assert slowest <= best + 1e-9
        whole = whole_shares(shares.tolist(), length, caps)
        assert sum(whole) == length
        assert max(n * c for n, c in zip(whole, costs, strict=True)) <= slowest + max(costs)


def test_shares_change_with_the_length() -> None:
    """One member is 3 times faster in products, another 3 times in attention."""
    lengths = np.array([1000.0, 1e6])
    costs = np.array([[1.0, 3.0]]).T + np.array([[3e-3, 1e-3]]).T * pairs_per_token(lengths)
    shares = balanced_shares(costs, np.full((2, 2), 1e9), lengths) / lengths
    assert shares[0, 0] > 0.55 and shares[0, 1] < 0.3


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_are_counted(window: int | None) -> None:
    for length in (1, 8, 40):
        seen = sum(min(i + 1, window or length) for i in range(length))
        found = float(pairs_per_token(np.array([float(length)]), window)[0]) * length
        assert found == pytest.approx(seen, abs=length)


def test_shares_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(PlanFormatError, match="add up to 9"):
        whole_shares([4.5, 4.5], 10, [10, 10])
    with pytest.raises(InfeasiblePlanError, match="no room"):
        whole_shares([5.5, 4.5], 10, [5, 4])
