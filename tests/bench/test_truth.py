"""The truth track's own runs: one layout trains, and its predictions are scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.plan.layout import parse_layout
from tools.bench.runs.truth import LAYOUTS, MODEL, NUM_RANKS, folder_name, measure
from tools.score_runs import score


def test_there_are_a_dozen_layouts_of_one_job_on_two_cores() -> None:
    assert len(LAYOUTS) >= 12 and len(set(LAYOUTS.values())) == len(LAYOUTS)
    assert len({folder_name(name) for name in LAYOUTS}) == len(LAYOUTS)
    given = dict(word.removeprefix("--").split("=") for word in MODEL)
    for text in LAYOUTS.values():
        layout = parse_layout(text)
        assert layout.num_devices <= NUM_RANKS
        sequences = sum(r.num_micro_batches * (r.micro_batch_size or 1) for r in layout.replicas)
        assert sequences == int(given["global-batch-size"])
        assert {r.num_layers for r in layout.replicas} == {int(given["num-layers"])}


@pytest.mark.slow
def test_a_layout_trains_and_its_bytes_are_predicted(tmp_path: Path) -> None:
    measure(tmp_path, ["pipeline 3:5"], steps=6, seconds=1.0)
    found = score(tmp_path / "RUNS.yaml")
    assert [one.term for one in found] == ["step", "live bytes", "live bytes"]
    assert [one.where for one in found[1:]] == ["here:0", "here:1"]
    for one in found[1:]:
        assert abs(one.error) <= 0.03, one
    assert found[0].measured > 0 and found[0].predicted > 0
