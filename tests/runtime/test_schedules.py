"""Schedules other than 1F1B train as one process does, number for number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.validate import validate_plan
from megatron_hetero.runtime.verify.jobs import Options
from megatron_hetero.runtime.verify.run import outcome_to_data, verify
from tests.runtime.schedules import with_interleaving
from tests.runtime.workloads import LLAMA_LIKE, plan, workload

INTERLEAVED: dict[str, tuple[str, list[tuple[int, int]], dict[str, Any]]] = {
    "two chunks each": (
        "tp2:3,tp1:3 @4",
        [(0, 1), (1, 2), (0, 2), (1, 1)],
        {"num_layers": 6, "sequence_parallel": True},
    ),
    "unlike numbers of chunks": (
        "tp1:2,tp2:2,tp1:3 @6 | tp1:7 @1",
        [(0, 2), (1, 1), (2, 1), (1, 1), (2, 2)],
        {"num_layers": 7, **LLAMA_LIKE, "per_token_loss": True},
    ),
}


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_stages_train_as_one_process(name: str, tmp_path: Path) -> None:
    layout, layers, changes = INTERLEAVED[name]
    _verify(with_interleaving(plan(layout), 0, layers), tmp_path, changes)


def _verify(asked: Plan, folder: Path, changes: dict[str, Any]) -> None:
    validate_plan(asked)
    options = Options(steps=3, optimizers=("sgd",))
    outcome = verify(asked, workload(**changes), options, folder)
    assert outcome.ok, outcome_to_data(outcome)
