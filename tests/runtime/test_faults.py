"""The check can fail: each planted error is caught, and by what it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.verify.faults import FAULTS, check_fault
from megatron_hetero.runtime.verify.jobs import Options
from megatron_hetero.runtime.verify.run import verify
from tests.runtime.workloads import plan, workload

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"

BROKEN = {
    "boundary-slice-dropped": {"loss", "gradients", "norm"},
    "slice-not-reduced": {"gradients"},
    "weighted-by-micro-batch": {"gradients", "norm"},
    "shard-counted-twice": {"norm"},
    "sample-moved": {"loss", "gradients", "samples"},
    "random-number-drawn-alone": {"random states"},
}


def test_every_fault_is_tried() -> None:
    assert set(BROKEN) == set(FAULTS)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_planted_error_is_caught(fault: str, optimizer: str, tmp_path: Path) -> None:
    options = Options(steps=2, optimizers=(optimizer,), fault=fault)
    outcome = verify(plan(LAYOUT), workload(per_token_loss=True), options, tmp_path)
    distances, bounds = (
        outcome.comparisons[optimizer].distances,
        outcome.comparisons[optimizer].bounds,
    )
    found = {
        "loss": distances.loss.value > bounds.loss,
        "gradients": distances.gradients.value > bounds.gradients,
        "norm": distances.gradient_norm.value > bounds.gradient_norm,
        "samples": not distances.same_samples,
        "random states": not distances.same_random_states,
    }
    assert not outcome.ok
    assert BROKEN[fault] <= {name for name, broken in found.items() if broken}


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of boundary-slice-dropped"):
        check_fault("nothing")
