"""For each error that can be planted: the job in which it matters, and what of it is found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_hetero.lab.verify.faults.newer import ONLY_RESUMED
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.run import Comparison, verify
from tests.runtime.on_machines import on_machines
from tests.runtime.workloads import LATENT, MIXTRAL_LIKE, plan, workload

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"
CONTEXT = "tp1cp2(1:3):3,tp1:1 @4 | tp1:4 @2"
STEPS, SAVED_AT = 3, 1
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
"""Errors of a plain job -> what of `found` is broken, with SGD and with Adam."""
LATER = ("weighted-by-micro-batch", "mask-ignored")
"""Errors that the first step, whose micro-batches count equally many tokens, does not have."""
FLAGS: dict[str, tuple[str, ...]] = {
    "weights-not-gathered": ("--use-distributed-optimizer",),
    "clip-forgotten": ("--clip-grad=0.1",),
}
DIVIDED = ("--use-distributed-optimizer",)
OVERLAPPED = (*DIVIDED, "--overlap-grad-reduce", "--overlap-param-gather")
EXPERTS = "tp3ep3(2:1:1):3,tp1:1 @4 | tp1:4 @2"
ON_MACHINES = ("tp1:2,tp1:2 @2 | tp1:4 @1 | tp1:4 @1 | tp1:4 @2", ["a", "b", "c", "d"])
GROUPS: tuple[list[list[str]], list[Any]] = ([["a", "b"], ["c", "d"]], [])
LOCAL: tuple[str, ...] = ("--transformer-impl=local",)
UNFUSED = (*LOCAL, "--attention-backend=unfused")
OVER_REPLICAS = "tp1ep2:3,tp2:1 @3 | tp1ep2:3,tp1:1 @3"
_Feature = tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]
"""Layout, changes of the model, flags of the plan, what of `found` is broken with Adam alone."""
FEATURES: dict[str, _Feature] = {
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
    "rows-sharpened": (CONTEXT, {}, (), ("gradients",)),
    "rows-rolled": (CONTEXT, {}, (), ("loss",)),
    "mask-shifted": (CONTEXT, {}, (), ("loss",)),
    "experts-uncounted": (OVER_REPLICAS, MIXTRAL_LIKE, (), ("norm",)),
    "started-unequal": (LAYOUT, {}, (), ("start",)),
    "last-slice-forgotten": (LAYOUT, {}, (), ("gradients",)),
    "regions-drop-alike": (LAYOUT, {}, (), ("region states",)),
    "steps-miscounted": (LAYOUT, {}, (), ("weights",)),
    "moments-forgotten": (LAYOUT, {}, (), ("weights",)),
    "second-moments-doubled": (LAYOUT, {}, (), ("weights",)),
}


@dataclass(frozen=True)
class Planted:
    """An error, and the verification that has to find it.

    `megatron_args` are flags of the job, `plan_flags` of the plan's runs; `due` is part of what is
    found with any of the `optimizers`.
    """

    fault: str
    due: frozenset[str]
    layout: str = LAYOUT
    changes: tuple[tuple[str, Any], ...] = ()
    plan_flags: tuple[str, ...] = ()
    megatron_args: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ("adam",)

    def due_with(self, optimizer: str) -> frozenset[str]:
        """Return what is broken; `gradients` are those of the first step with Adam."""
        if optimizer == "adam" and self.fault in LATER:
            return self.due - {"gradients"} | {"later gradients"}
        return self.due

    @property
    def resumes(self) -> bool:
        return self.fault in ONLY_RESUMED

    @property
    def one_process(self) -> str:
        """Name the job of the one process, which is the same for many errors."""
        return repr((self.layout, self.changes, self.megatron_args))


def planted(fault: str) -> Planted:
    """Return the verification for an error."""
    if fault in BROKEN:
        flags = FLAGS.get(fault, ())
        of_job = tuple(f for f in flags if f.startswith("--clip-grad"))
        of_plan = tuple(f for f in flags if f not in of_job)
        due = frozenset(BROKEN[fault])
        return Planted(fault, due, LAYOUT, (), of_plan, of_job, ("sgd", "adam"))
    layout, changes, flags, found = FEATURES[fault]
    given: tuple[str, ...] = LOCAL if layout == CONTEXT else ()
    if fault == "mask-shifted":
        given = UNFUSED
    return Planted(fault, frozenset(found), layout, tuple(changes.items()), flags, given)


def find(error: Planted, folder: Path, optimizer: str, reuses: bool = False) -> set[str]:
    """Verify a job with an error in it; return what was found.

    Args:
        error: the error, and its job.
        folder: of the run's files.
        optimizer: one of the error's.
        reuses: take what the one process has trained in `folder` before.
    """
    options = Options(
        steps=STEPS,
        optimizers=(optimizer,),
        fault=error.fault,
        plan_flags=error.plan_flags,
        reuses=reuses,
        resumes_after=SAVED_AT if error.resumes else 0,
    )
    job = workload(**({"per_token_loss": True} | dict(error.changes)))
    job = replace(job, megatron_args=error.megatron_args)
    machines = error.layout == "machines"
    tried = on_machines(*ON_MACHINES, *GROUPS) if machines else plan(error.layout)
    outcome = verify(tried, job, options, folder)
    return broken(outcome.comparisons[optimizer])


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
        "region states": not distances.own_region_states,
        "start": distances.unequal_start is not None,
        "holders": distances.unequal_holder is not None,
        "draw": distances.unlike_draw is not None,
        "log": distances.unlike_log is not None,
    }
    return {name for name, is_broken in found.items() if is_broken}
