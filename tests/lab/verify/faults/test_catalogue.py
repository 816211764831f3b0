"""The check can fail: each planted error is caught, and by what it breaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.verify.faults.catalogue import FAULTS, check_fault
from megatron_hetero.lab.verify.processes.jobs import Options
from megatron_hetero.lab.verify.run import verify
from tests.runtime.workloads import plan, workload

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"

BROKEN = {
    "boundary-slice-dropped": {"loss", "gradients", "norm"},
    "boundary-halves-swapped": {"loss", "gradients", "norm"},
    "boundary-rounded": {"loss", "gradients", "norm"},
    "slice-not-reduced": {"gradients"},
    "bucket-not-reduced": {"gradients"},
    "tied-embedding-not-reduced": {"gradients"},
    "weighted-by-micro-batch": {"gradients", "norm"},
    "replica-weighs-more": {"gradients", "norm"},
    "weights-not-gathered": {"weights"},
    "shard-counted-twice": {"norm"},
    "clip-forgotten": {"weights"},
    "sample-moved": {"loss", "gradients", "samples"},
    "micro-batch-twice": {"loss", "gradients", "samples"},
    "samples-shifted": {"loss", "gradients", "samples"},
    "mask-ignored": {"loss", "gradients"},
    "random-number-drawn-alone": {"random states"},
    "unequal-starts": {"start"},
    "learns-faster-alone": {"weights"},
}
FLAGS = {
    "weights-not-gathered": ("--use-distributed-optimizer",),
    "clip-forgotten": ("--clip-grad=0.1",),
}
OPTIMIZERS = ("sgd", "adam")
FAST = (
    ("boundary-rounded", "sgd"),
    ("weights-not-gathered", "sgd"),
    ("samples-shifted", "adam"),
    ("random-number-drawn-alone", "adam"),
    ("unequal-starts", "sgd"),
)
"""So few that every comparison has found something; all with both optimizers are slow."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process trains once for all errors, which are planted in the plan's runs."""
    return tmp_path_factory.mktemp("shared")


def test_every_fault_is_tried() -> None:
    assert set(BROKEN) == set(FAULTS)
    fast = set().union(*(BROKEN[fault] for fault, _ in FAST))
    assert fast == set().union(*BROKEN.values())


@pytest.mark.parametrize(
    ("fault", "optimizer"),
    [
        pytest.param(f, o, marks=[] if (f, o) in FAST else [pytest.mark.slow])
        for f in BROKEN
        for o in OPTIMIZERS
    ],
)
def test_a_planted_error_is_caught(
    fault: str, optimizer: str, shared: Path, tmp_path: Path
) -> None:
    options = Options(
        steps=2,
        optimizers=(optimizer,),
        fault=fault,
        plan_flags=FLAGS.get(fault, ()),
        reuses=True,
    )
    job, folder = workload(per_token_loss=True), shared
    if "--clip-grad=0.1" in options.plan_flags:
        job, folder = replace(job, megatron_args=("--clip-grad", "0.1")), tmp_path
    outcome = verify(plan(LAYOUT), job, options, folder)
    distances, bounds = (
        outcome.comparisons[optimizer].distances,
        outcome.comparisons[optimizer].bounds,
    )
    found = {
        "loss": distances.loss.value > bounds.loss,
        "gradients": distances.gradients.value > bounds.gradients,
        "norm": distances.gradient_norm.value > bounds.gradient_norm,
        "weights": distances.weights.value > bounds.weights,
        "samples": not distances.same_samples,
        "random states": not distances.same_random_states,
        "start": distances.unequal_start is not None,
    }
    assert not outcome.ok
    assert BROKEN[fault] <= {name for name, broken in found.items() if broken}


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of boundary-slice-dropped"):
        check_fault("nothing")
