"""`--use-distributed-optimizer`: the optimizer's state divided among unlike replicas."""

from __future__ import annotations

from dataclasses import replace
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


def test_a_gpu_of_more_memory_keeps_more_of_the_state(tmp_path: Path) -> None:
    """The wide replica keeps a quarter, the other three; the training is the same."""
    asked = plan("tp2:4 @2 | tp1:4 @2")
    wide, single = asked.replicas
    stages = (replace(single.stages[0], optimizer_share=3),)
    asked = replace(asked, replicas=(wide, replace(single, stages=stages)))
    options = Options(steps=3, optimizers=("adam",), plan_flags=("--use-distributed-optimizer",))
    outcome = verify(asked, workload(), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
    log = (tmp_path / "adam" / "plan" / "rank-0.log").read_text()
    (line,) = [line for line in log.splitlines() if line.startswith("> optimizer state")]
    low, high = [int(word[:-1]) for word in line.split() if word.endswith("%")][:2]
    assert low in range(22, 27) and high in range(72, 77), line
