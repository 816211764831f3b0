"""Initial weights have the distributions of Megatron's own initialisation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from tests.runtime.workloads import plan, workload


def test_mup_draws_an_output_layer_of_its_own_as_embeddings(tmp_path: Path) -> None:
    """Its other matrices are the smaller, the wider the model is."""
    flags = ("--use-mup", "--mup-base-hidden-size=16")
    job = replace(workload(tied_embeddings=False), megatron_args=flags)
    outcome = verify(plan("tp1:3,tp1:1 @2"), job, Options(steps=1, optimizers=("sgd",)), tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
