"""OSDP's choice: exact beside brute force, and its tables read as text."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from tools.referees.osdp import HIDDEN_SIZES, Level, choose, read_tables


@pytest.mark.parametrize("seed", range(40))
def test_counts_are_those_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    levels = [Level(rng.uniform(1, 3), rng.randint(1, 30)) for _ in range(4)]
    num_layers = rng.randint(1, 7)
    limit_mb = rng.randint(num_layers, 25 * num_layers)
    plans = [
        (sum(level.seconds for level in plan), sum(level.megabytes for level in plan))
        for plan in product(levels, repeat=num_layers)
    ]
    fitting = [seconds for seconds, megabytes in plans if megabytes <= limit_mb]
    found = choose(levels, num_layers, limit_mb)
    if not fitting:
        assert found is None
        return
    assert found is not None and found.megabytes <= limit_mb
    assert found.seconds == pytest.approx(min(fitting))
    assert sum(found.counts) == num_layers


def test_tables_are_read_as_text_and_never_run(tmp_path: Path) -> None:
    file = tmp_path / "sharded_data_parallel/osdp_modules/profiler_output.py"
    file.parent.mkdir(parents=True)
    rows = [[[1.0 + i, 2.0], [3.0, 4.0]] for i in range(len(HIDDEN_SIZES))]
    file.write_text(f"time_map = {rows}\nmem_map = {rows}\nextra_overhead = 800\n1 / 0\n")
    tables, overhead_mb = read_tables(tmp_path)
    assert overhead_mb == 800
    assert tables[HIDDEN_SIZES[2]][0] == [Level(3.0, 3), Level(2.0, 2)]
    file.write_text("time_map = open('x')\nmem_map = []\nextra_overhead = 800\n")
    with pytest.raises(ValueError, match="malformed"):
        read_tables(tmp_path)
