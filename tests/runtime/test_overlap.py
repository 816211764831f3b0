"""`--overlap-grad-reduce`: the same numbers, with buckets under way during the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from tests.runtime.workloads import LLAMA_LIKE, plan, workload

CASES = {
    "unlike depth": ("tp2:3,tp1:1 @4 | tp1:4 @2", {"per_token_loss": True}),
    "crossed": ("tp2:1,tp1:3 @2 | tp1:2,tp2:2 @3", {**LLAMA_LIKE, "sequence_parallel": True}),
}


@pytest.mark.parametrize("name", [pytest.param("unlike depth", marks=pytest.mark.slow), "crossed"])
def test_an_overlapped_sync_trains_as_one_process(name: str, tmp_path: Path) -> None:
    layout, changes = CASES[name]
    flags = ("--overlap-grad-reduce", "--no-align-grad-reduce")
    options = Options(steps=3, optimizers=("sgd",), plan_flags=flags)
    outcome = verify(plan(layout), workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
