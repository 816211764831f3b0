"""Experts dealt out over replicas, and beside context parallelism, train as one process does.

The stages that deal experts out together are alike; elsewhere in the pipeline their replicas are
not, so that stock Megatron runs none of these plans.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.schedule.proof.check import check_operations
from megatron_hetero.schedule.proof.of_plan import job_operations
from megatron_hetero.schedule.stock import is_stock
from tests.runtime.workloads import DEEPSEEK_LIKE, MIXTRAL_LIKE, plan, workload

GROUPED = {**MIXTRAL_LIKE, "num_query_groups": 24}
DIVIDED = {"use_distributed_optimizer": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "first stages": ("tp1ep2:3,tp2:1 @3 | tp1ep2:3,tp1:1 @3", GROUPED),
    "last stages": ("tp2:2,tp1ep2:2 @3 | tp1:2,tp1ep2:2 @3", GROUPED),
    "every stage": (
        "tp1ep2:2,tp2ep4:2 @3 | tp1ep2:2,tp2ep4:2 @3",
        {**GROUPED, **DIVIDED, "overlap_grad_reduce": True},
    ),
    "divided experts": (
        "tp2ep2etp2:2,tp1:2 @3 | tp2ep2etp2:2,tp2:2 @3",
        {**GROUPED, **DIVIDED, "per_token_loss": True},
    ),
    "experts divided wider than the rest": (
        "tp1ep1etp2:2,tp1:2 @3 | tp1ep1etp2:2,tp2:2 @3",
        GROUPED,
    ),
    "whole experts on every rank": ("tp2ep1etp1:2,tp1:2 @4 | tp2:4 @2", GROUPED),
    "a third replica": ("tp2ep4:2,tp1:2 @2 | tp2ep4:2,tp2:2 @2 | tp1:4 @2", DEEPSEEK_LIKE),
    "a replica that deals inside": (
        "tp1ep2:2,tp1:2 @2 | tp2ep2(3:1):4 @2 | tp1ep2:2,tp2:2 @2",
        {**GROUPED, "per_token_loss": True},
    ),
    "unlike depth": ("tp1ep2:2,tp1:2 @2 | tp1ep2:2,tp1:1,tp1:1 @2", GROUPED),
    "two pairs": (
        "tp1ep2:4 @2 | tp1ep2:4 @2 | tp1ep2:2,tp1:2 @1 | tp1ep2:2,tp1:2 @1",
        {**GROUPED, **DIVIDED},
    ),
    "recompute": (
        "tp1ep2:3,tp2:1 @3 | tp1ep2:3,tp1:1 @3",
        {**DEEPSEEK_LIKE, "recompute": "full", "micro_batch_size": 2},
    ),
    "gathered tokens": ("tp2ep4:3,tp1:1 @3 | tp2ep4:3,tp2:1 @3", GROUPED),
    "gathered tokens of divided experts": (
        "tp2ep2etp2:2,tp1:2 @3 | tp2ep2etp2:2,tp2:2 @3",
        {**GROUPED, "per_token_loss": True},
    ),
    "divided sequences": ("tp1cp2:2,tp2:2 @3 | tp1cp2:4 @3", GROUPED),
    "divided sequences, by token": (
        "tp2cp2:2,tp1cp2:2 @3",
        {**GROUPED, **DIVIDED, "per_token_loss": True},
    ),
    "divided sequences, dealt inside": ("tp2cp2ep2:2,tp1:2 @4 | tp1cp2:4 @2", GROUPED),
    "divided sequences, dealt over replicas": (
        "tp1cp2ep4:2,tp1:2 @3 | tp1cp2ep4:2,tp2:2 @3",
        GROUPED,
    ),
    "divided sequences of latents": (
        "tp1cp2ep2:3,tp2:1 @3 | tp1cp2ep2:3,tp1:1 @3",
        DEEPSEEK_LIKE,
    ),
}
_FAST = {"divided experts", "divided sequences"}
"""The fewest in which groups of all kinds differ from those of a stage, and every loss is summed
over parts of sequences."""
_GATHERED = {name for name in CASES if name.startswith("gathered")}
"""With Megatron's default dispatcher; the others exchange all to all."""
_ALL_TO_ALL = ("--moe-token-dispatcher-type=alltoall",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in _FAST)) for n in CASES]
)
def test_a_plan_trains_as_one_process(name: str, tmp_path: Path) -> None:
    layout, changes = CASES[name]
    asked = plan(layout)
    assert not is_stock(asked)
    options = Options(
        steps=2,
        optimizers=("adam",) if name in _FAST else ("sgd", "adam"),
        plan_flags=() if name in _GATHERED else _ALL_TO_ALL,
    )
    outcome = verify(asked, workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first stages", "divided sequences, dealt over replicas"])
def test_routers_choose_as_one_process_does(name: str, tmp_path: Path) -> None:
    layout, changes = CASES[name]
    options = Options(steps=2, optimizers=("adam",), precision="bf16", plan_flags=_ALL_TO_ALL)
    outcome = verify(plan(layout), workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)


@pytest.mark.parametrize("layout", [layout for layout, _ in CASES.values()])
def test_the_exchanges_of_tokens_are_proved_to_end(layout: str) -> None:
    job = workload(**GROUPED, overlap_grad_reduce=True, use_distributed_optimizer=True)
    asked = plan_from_layout(parse_layout(layout))
    check_operations(asked, job)
    operations = job_operations(asked, job)
    experts = {n for n, group in enumerate(operations.groups) if group.use == "experts"}
    for number in experts:
        for rank in operations.groups[number].ranks:
            items = operations.ranks[rank][operations.training[rank]]
            assert any(item.kind == "collective" and item.group == number for item in items)
