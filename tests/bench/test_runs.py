"""Benchmarks of real processes, each at its smallest: they end well and print rows."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tools import results

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "num_rows"),
    [
        ("boundary --turns 1 --kib 4", 4),
        ("sync --turns 1", 12),
        ("start --ranks 64", 1),
        ("precision --steps 12", 1),
        ("step-time --only TP --steps 3", 2),
    ],
)
def test_a_benchmark_of_ranks_runs(command: str, num_rows: int) -> None:
    done = subprocess.run(
        [sys.executable, "tools/bench", *shlex.split(command)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table, *_ = results.tables_in(done.stdout)
    assert len(table.rows) == num_rows
