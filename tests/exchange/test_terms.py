"""GenModel's terms, counted on one switch."""

from __future__ import annotations

import pytest

from megatron_hetero.exchange.baselines import halving_doubling, parameter_servers, ring
from megatron_hetero.exchange.terms import term_counts
from tools.referees.gentree.baselines import two_level


@pytest.mark.parametrize("n", range(2, 65))
def test_term_counts_are_those_of_the_table(n: int) -> None:
    size = 60 * n * n
    once = (n - 1) / n
    found = term_counts(ring(size, n))
    assert found.num_rounds == 2 * (n - 1) and found.num_senders == 1
    assert [found.sent, found.added, found.accessed] == pytest.approx([2 * once, once, 3 * once])
    found = term_counts(parameter_servers(size, n))
    assert found.num_rounds == 2 and found.num_senders == n - 1
    assert [found.sent, found.added, found.accessed] == pytest.approx([2 * once, once, (n + 1) / n])
    if n & (n - 1) == 0:
        found = term_counts(halving_doubling(size, n))
        assert found.num_rounds == 2 * (n.bit_length() - 1) and found.num_senders == 1
        expected = [2 * once, once, 3 * once]
        assert [found.sent, found.added, found.accessed] == pytest.approx(expected)
    for f in range(2, n):
        if n % f == 0:
            found = term_counts(two_level(size, n, f))
            assert found.num_rounds == 4
            assert found.num_senders == max(f - 1, n // f - 1)
            expected = [2 * once, once, (f + 1) / f + (n / f + 1) / n]
            assert [found.sent, found.added, found.accessed] == pytest.approx(expected)
