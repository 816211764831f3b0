"""`--use-distributed-optimizer`: the optimizer's state divided among unlike replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.runtime.verify.jobs import Options
from megatron_hetero.runtime.verify.run import outcome_to_data, verify
from tests.runtime.workloads import LLAMA_LIKE, plan, workload

CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "unlike depth": ("tp2:3,tp1:1 @4 | tp1:4 @2", {"per_token_loss": True}, ()),
    "unlike uneven shares": (
        "tp3(2:1:1):2,tp2(1:3):2 @3 | tp2:4 @2",
        {**LLAMA_LIKE, "sequence_parallel": True},
        ("--overlap-grad-reduce", "--no-align-grad-reduce"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_divided_optimizer_trains_as_one_process(name: str, tmp_path: Path) -> None:
    layout, changes, flags = CASES[name]
    options = Options(plan_flags=("--use-distributed-optimizer", *flags))
    outcome = verify(plan(layout), workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
