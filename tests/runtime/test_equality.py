"""The proof: asymmetric plans train as one process of stock Megatron does, number for number.

Between them the cases cover pipelines of 1 to 4 stages, widths 1 to 4 mixed inside a pipeline and
across replicas, tied and untied embeddings, sequence parallelism on and off, unlike micro-batch
counts, uneven shares of unlike GPUs, grouped queries, gated MLPs, recompute, and up to 8 processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from tests.runtime.workloads import DEEPSEEK_LIKE, LATENT, LLAMA_LIKE, MIXTRAL_LIKE, plan, workload

STEPS = 2
"""Every error that can be planted shows within two (`tests/lab/verify/faults`)."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "narrowing": ("tp2:3,tp1:1 @6", {}),
    "widening": ("tp1:1,tp2:3 @4", {"tied_embeddings": False, "sequence_parallel": True}),
    "waist": ("tp2:1,tp1:2,tp2:1 @4", {"sequence_parallel": True}),
    "three widths": ("tp1:1,tp3:1,tp2:2 @3", {"per_token_loss": True}),
    "four stages": ("tp1:1,tp2:1,tp1:1,tp1:1 @5", {"tied_embeddings": False}),
    "unlike depth": ("tp2:3,tp1:1 @4 | tp1:4 @2", {"per_token_loss": True}),
    "unlike depth, mean loss": ("tp2:3,tp1:1 @4 | tp1:4 @2", {"sequence_parallel": True}),
    "unlike width": (
        "tp2:4 @3 | tp1:4 @1",
        {"sequence_parallel": True, "tied_embeddings": False, "per_token_loss": True},
    ),
    "crossed": ("tp2:1,tp1:3 @2 | tp1:2,tp2:2 @3", {**LLAMA_LIKE, "per_token_loss": True}),
    "coprime widths": ("tp3:2,tp2:2 @3 | tp1:4 @2", {"sequence_parallel": True}),
    "eight processes": (
        "tp4:3,tp2:1 @3 | tp1:2,tp1:2 @2",
        {**LLAMA_LIKE, "sequence_parallel": True, "per_token_loss": True},
    ),
    "three replicas": ("tp2:4 @2 | tp1:1,tp1:3 @2 | tp1:4 @1", {"qk_layernorm": True}),
    "deep and shallow": ("tp1:1,tp1:1,tp1:1,tp1:1 @5 | tp1:4 @1", {"add_qkv_bias": True}),
    "uneven shares": ("tp4(3:2:2:1):3,tp1:1 @3 | tp1:4 @2", {"per_token_loss": True}),
    "unlike uneven shares": (
        "tp3(2:1:1):2,tp2(1:3):2 @3 | tp2:4 @2",
        {**LLAMA_LIKE, "sequence_parallel": True},
    ),
    "unlike micro-batch sizes": ("tp2:3,tp1:1 @2x2 | tp1:4 @4", {"per_token_loss": True}),
    "experts": ("tp2:3,tp1:1 @4 | tp1:2,tp2:2 @2", {**MIXTRAL_LIKE, "num_query_groups": 24}),
    "experts in uneven shares": (
        "tp3(2:1:1):2,tp1:2 @3 | tp2(1:3):4 @2",
        {**MIXTRAL_LIKE, "per_token_loss": True, "use_distributed_optimizer": True},
    ),
    "experts dealt out": (
        "tp2ep2:2,tp1:2 @3 | tp2:4 @2",
        {**MIXTRAL_LIKE, "num_query_groups": 24},
    ),
    "experts dealt out unequally": (
        "tp3ep3(2:1:1):2,tp1:2 @3 | tp2(1:3)ep2(3:1):4 @2",
        {**DEEPSEEK_LIKE, "per_token_loss": True, "use_distributed_optimizer": True},
    ),
    "latent attention": ("tp2:2,tp1:2 @3 | tp1:4 @2", {**LATENT, "per_token_loss": True}),
    "latent attention in uneven shares": (
        "tp3(2:1:1):2,tp1:2 @3 | tp2(1:3):4 @2",
        {**LATENT, "q_lora_rank": 0, "qk_layernorm": False, "sequence_parallel": True},
    ),
    "dense layers below experts": ("tp2:3,tp1:1 @4 | tp1:2,tp2:2 @2", DEEPSEEK_LIKE),
    "dense layers below experts in uneven shares": (
        "tp3(2:1:1):2,tp1:2 @3 | tp2(1:3):4 @2",
        {**DEEPSEEK_LIKE, "per_token_loss": True, "use_distributed_optimizer": True},
    ),
    "a gate of heads": (
        "tp2:3,tp1:1 @4 | tp1:4 @2",
        {**LLAMA_LIKE, "attention_output_gate": True, "sequence_parallel": True},
    ),
    "recompute": ("tp2:2,tp1:2 @3 | tp1:4 @3", {"recompute": "full", "micro_batch_size": 2}),
}


# The generated plans of `test_pairs` have what these have; the default tests keep the clearest few,
# each with what several others have.
_SLOW = {
    "narrowing",
    "experts",
    "experts in uneven shares",
    "unlike micro-batch sizes",
    "dense layers below experts in uneven shares",
    "widening",
    "waist",
    "three widths",
    "unlike depth",
    "recompute",
    "four stages",
    "unlike depth, mean loss",
    "unlike width",
    "coprime widths",
    "three replicas",
    "deep and shallow",
    "uneven shares",
    "latent attention",
    "latent attention in uneven shares",
    "experts dealt out",
    "experts dealt out unequally",
    "a gate of heads",
}
_WITH_SGD_FIRST = {
    "eight processes",
    "unlike uneven shares",
    "dense layers below experts",
}
"""Gradients are of the layout, and what Adam does with them the other cases show: slow here."""


def _runs() -> Iterator[object]:
    for name in CASES:
        marks = [pytest.mark.slow] * (name in _SLOW)
        if name not in _WITH_SGD_FIRST:
            yield pytest.param(name, ("sgd", "adam"), id=name, marks=marks)
            continue
        yield pytest.param(name, ("sgd",), id=name, marks=marks)
        yield pytest.param(name, ("adam",), id=f"{name}, Adam", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "optimizers"), list(_runs()))
def test_a_plan_trains_as_one_process(
    name: str, optimizers: tuple[str, ...], tmp_path: Path
) -> None:
    layout, changes = CASES[name]
    outcome = verify(plan(layout), workload(**changes), Options(STEPS, optimizers), tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
    for comparison in outcome.comparisons.values():
        assert len(comparison.losses) == STEPS


@pytest.mark.slow
def test_the_loss_falls(tmp_path: Path) -> None:
    # Each step has other tokens: the loss of two or three steps says little of training.
    layout, changes = CASES["narrowing"]
    outcome = verify(plan(layout), workload(**changes), Options(12), tmp_path)
    for comparison in outcome.comparisons.values():
        one_process, by_plan = zip(*comparison.losses, strict=True)
        for losses in (one_process, by_plan):
            assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.slow  # a generated plan of the default tests has stages of all three kinds
def test_a_stage_recomputes_by_itself(tmp_path: Path) -> None:
    asked = plan("tp2:3,tp1:1 @4 | tp1:4 @2")
    settings = ({"recompute": "full", "recompute_num_layers": 2}, {"recompute": "selective"})
    stages = tuple(
        replace(stage, **changes)
        for stage, changes in zip(asked.replicas[0].stages, settings, strict=True)
    )
    replicas = (replace(asked.replicas[0], stages=stages), asked.replicas[1])
    # Recompute is of gradients; what Adam does with them other cases show.
    options = Options(STEPS, ("sgd",))
    outcome = verify(replace(asked, replicas=replicas), workload(), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)


@pytest.mark.parametrize(
    "counts",
    [
        (8, 5, 1),
        # One at a time is part of the generated plans of `test_pairs`.
        *(
            pytest.param(counts, marks=pytest.mark.slow)
            for counts in ((1, 1, 1), (8, 8, 8), (4, 4, 1), (6, 2, 2))
        ),
    ],
    ids=str,
)
def test_launch_counts_change_the_order_and_nothing_else(
    counts: tuple[int, ...], tmp_path: Path
) -> None:
    """Far more forwards ahead than 1F1B's 3, 2, 1, down to one at a time."""
    asked = plan("tp2:2,tp1:1,tp2:1 @8")
    stages = tuple(
        replace(stage, num_launched_forwards=count)
        for stage, count in zip(asked.replicas[0].stages, counts, strict=True)
    )
    asked = replace(asked, replicas=(replace(asked.replicas[0], stages=stages),))
    options = Options(steps=2, optimizers=("sgd",))
    outcome = verify(asked, workload(sequence_parallel=True), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)


def test_the_floor_of_rounding_is_measured(tmp_path: Path) -> None:
    """One process differs from itself in another rounding, so zero cannot be asked."""
    options = Options(STEPS, optimizers=("sgd",), floor=True)
    outcome = verify(
        plan("tp2:3,tp1:1 @4 | tp1:4 @2"), workload(per_token_loss=True), options, tmp_path
    )
    comparison = outcome.comparisons["sgd"]
    assert comparison.floor is not None
    assert 0 < comparison.floor.gradients.value <= comparison.bounds.gradients
    assert outcome.ok
