"""The check can fail: each planted error is caught, and by what it breaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.verify.faults.catalogue import FAULTS, check_fault
from megatron_hetero.lab.verify.processes.jobs import Options
from megatron_hetero.lab.verify.run import Comparison, verify
from tests.runtime.on_machines import on_machines
from tests.runtime.workloads import LATENT, MIXTRAL_LIKE, plan, workload

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"
CONTEXT = "tp1cp2(1:3):3,tp1:1 @4 | tp1:4 @2"
FURTHER: dict[str, Any] = {"position_embedding": "rope", "mtp_num_layers": 1}

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
DIVIDED = ("--use-distributed-optimizer",)
OVERLAPPED = (*DIVIDED, "--overlap-grad-reduce", "--overlap-param-gather")
EXPERTS = "tp3ep3(2:1:1):3,tp1:1 @4 | tp1:4 @2"
ON_MACHINES = ("tp1:2,tp1:2 @2 | tp1:4 @1 | tp1:4 @1 | tp1:4 @2", ["a", "b", "c", "d"])
GROUPS = ([["a", "b"], ["c", "d"]], [])
Job = tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]
"""Layout, changes of the model, flags of the plan, what of `found` is broken with Adam alone."""
JOBS: dict[str, Job] = {
    "weights-used-early": (LAYOUT, {}, OVERLAPPED, ("loss", "later gradients")),
    "last-bit-moved": (LAYOUT, {}, (), ("holders",)),
    "later-gradients-shifted": (LAYOUT, {}, (), ("later gradients",)),
    "outputs-drawn-unscaled": (LAYOUT, {}, (), ("draw",)),
    "layers-drawn-alike": (LAYOUT, {}, (), ("draw",)),
    "further-losses-logged-wrong": (LAYOUT, FURTHER, (), ("log",)),
    "balance-logged-by-stage": (LAYOUT, MIXTRAL_LIKE, (), ("log",)),
    "expert-slots-swapped": (EXPERTS, MIXTRAL_LIKE, (), ("loss",)),
    "expert-weights-forgotten": (EXPERTS, MIXTRAL_LIKE, (), ("loss",)),
    "own-heads-gradient": ("tp2:3,tp1:1 @6", LATENT, (), ("gradients",)),
    "exchange-piece-forgotten": ("machines", {}, (), ("gradients",)),
    "pair-sum-skipped": ("machines", {}, (), ("gradients",)),
    "exchange-of-zeros": ("machines", {}, (), ("gradients",)),
    "divided-holder-forgotten": (LAYOUT, {}, DIVIDED, ("gradients",)),
    "owned-rows-shifted": (LAYOUT, {}, DIVIDED, ("gradients",)),
    "context-pieces-reversed": (CONTEXT, {}, (), ("loss",)),
    "next-token-seen": (CONTEXT, {}, (), ("loss",)),
    "more-tokens-counted": (LAYOUT, {}, (), ("gradients", "norm")),
    "old-gradients-kept": (LAYOUT, {}, (), ("norm",)),
    "vocabulary-shifted": (LAYOUT, {}, (), ("loss",)),
    "labels-shifted": (LAYOUT, {}, (), ("loss",)),
    "positions-shifted": (LAYOUT, {}, (), ("loss",)),
    "decays-more-alone": (LAYOUT, {}, (), ("weights",)),
    "further-tokens-weigh-more": (LAYOUT, FURTHER, (), ("gradients",)),
    "balance-weighs-more": (LAYOUT, MIXTRAL_LIKE, (), ("gradients",)),
    "boundary-gradients-scaled": ("tp2:3,tp1:1 @6", {}, (), ("gradients",)),
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
    assert set(BROKEN) | set(JOBS) == set(FAULTS)
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
    assert not outcome.ok
    assert BROKEN[fault] <= broken(outcome.comparisons[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("fault", JOBS)
def test_an_error_of_a_feature_is_caught_with_adam_alone(fault: str, tmp_path: Path) -> None:
    layout, changes, flags, due = JOBS[fault]
    options = Options(steps=3, optimizers=("adam",), fault=fault, plan_flags=flags)
    job = workload(**({"per_token_loss": True} | changes))
    if layout == CONTEXT:
        job = replace(job, megatron_args=("--transformer-impl=local",))
    tried = plan(layout) if layout != "machines" else on_machines(*ON_MACHINES, *GROUPS)
    outcome = verify(tried, job, options, tmp_path)
    assert not outcome.ok
    assert set(due) <= broken(outcome.comparisons["adam"])


def broken(comparison: Comparison) -> set[str]:
    """Name what a comparison found."""
    distances, bounds = comparison.distances, comparison.bounds

    def is_far(name: str) -> bool:
        return not getattr(distances, name).value <= getattr(bounds, name)

    found = {
        "loss": is_far("loss"),
        "gradients": is_far("gradients"),
        "later gradients": is_far("later_gradients"),
        "norm": is_far("gradient_norm"),
        "weights": is_far("weights"),
        "samples": not distances.same_samples,
        "random states": not distances.same_random_states,
        "start": distances.unequal_start is not None,
        "holders": distances.unequal_holder is not None,
        "draw": distances.unlike_draw is not None,
        "log": distances.unlike_log is not None,
    }
    return {name for name, is_broken in found.items() if is_broken}


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of boundary-slice-dropped"):
        check_fault("nothing")
