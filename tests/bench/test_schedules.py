"""The benchmark of schedules: its table has the published rows, and a run runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.schedule.check import check_schedule
from tools.bench.schedules.schedules import CASES, SCHEDULES, schedules, simulated_s


@pytest.mark.parametrize(
    ("hop", "own_s", "harp_s", "rule_s"),
    [(0.25, 83, 67.5, 67.5), (0.5, 99, 68, 68), (1, 131, 69, 69), (2, 195, 101, 71)],
)
def test_even_stages_have_the_published_rows(
    hop: float, own_s: float, harp_s: float, rule_s: float
) -> None:
    """P = 4, m = 64, a slow hop in the middle: 1F1B, HARP's steps, the rule."""
    found = {n: simulated_s(asked, made) for n, asked, made in schedules(CASES[0], hop, 64)}
    assert tuple(found) == SCHEDULES
    assert found["1F1B"] == pytest.approx(own_s)
    assert found["HARP's steps"] == pytest.approx(harp_s)
    assert found["launch counts"] == pytest.approx(rule_s)
    assert found["synthesised"] <= found["zero-bubble"] <= found["launch counts"]


def test_every_schedule_of_the_benchmark_can_run() -> None:
    for case in CASES:
        for _, _, schedule in schedules(case, 1.0, 10):
            check_schedule(schedule)


def test_sleeping_stages_run(tmp_path: Path) -> None:
    """Chunks and split passes through the executor, with passes and hops of next to no length."""
    from tools.sleeping_pipeline import measure

    for name, asked, schedule in schedules(CASES[2], 1.0, 3):
        if name in ("interleaved", "zero-bubble"):
            assert measure(asked, schedule, 1e-4, tmp_path / name, 1) > 0
