"""The shapes that figures are made of."""

from __future__ import annotations

import pytest

from megatron_hetero.report.page.figure import ticks


def test_ticks_are_round_and_reach_the_limit() -> None:
    assert ticks(8.0) == pytest.approx(list(range(9)))
    assert ticks(0.9, 4) == pytest.approx([0.0, 0.5])


@pytest.mark.timeout(10)
def test_what_lasts_no_time_has_one_tick() -> None:
    assert ticks(0.0) == [0.0]
