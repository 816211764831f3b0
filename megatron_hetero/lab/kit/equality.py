"""Asymmetric plans beside a single process of stock Megatron, by `lab.verify`, on the machine at
hand.

On GPUs NCCL is between the ranks, which share cards where there are too few
(`runtime.job.local`); without any, the ranks are processes on the CPU over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from megatron_hetero.lab.kit.cases import Case
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.verify.command import default_flags
from megatron_hetero.lab.verify.distance.compare import Distances, compare, tolerances
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.outcome import outcome_to_data
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.run import (
    data_ranks,
    is_drawn_alike,
    records,
    tensor_groups,
    verify,
)
from megatron_hetero.lab.verify.small.job_flags import job_flags
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.runtime.job.local.launch import run_jobs

STEPS, SAVED_AT = 3, 2
LIMIT_S = 120.0
"""Seconds that a run of a case may take. A run on a GPU takes 20; a hang shall not take all."""
_KEYS = ("loss", "gradients", "gradient_norm", "weights")
_PLACES = ("unequal_initial_weights", "unequal_holders")
"""Keys of a weight that ranks do not have alike, by its name."""


def try_case(
    case: Case,
    machine: Machine,
    folder: Path,
    on_progress: Callable[[str], None],
    fault: str | None = None,
) -> dict[str, Any]:
    """Train the plan and one process; return the distances and tolerances of the verification.

    Args:
        case: the plan.
        machine: the GPUs of the machine, or none.
        folder: for the files of the runs.
        on_progress: called often with the present run and step, in words.
        fault: an error of `lab.verify.faults`, planted in the plan's runs.
    Raises:
        HeteroError: as `lab.verify.run.verify`.
    """
    # The case's flags on a small model.
    layout = parse_layout(case.layout)
    flags = (*default_flags(layout), *case.flags, f"--transformer-impl={case.layers}")
    if case.precision != "fp32":
        flags = (*flags, f"--{case.precision}")
    workload = load_workload(None, flags, is_planned=False)
    options = Options(
        steps=STEPS,
        optimizers=(case.optimizer,),
        precision=case.precision,
        fault=fault,
        limit_s=LIMIT_S,
    )
    # A case without a save is one verification.
    plan = plan_from_layout(layout, workload)
    if case.change is not None:
        plan = case.change(plan)
    if case.resumed is None:
        data = outcome_to_data(verify(plan, workload, options, folder, on_progress))
        (run,) = data["runs"].values()
        return {**data, **{key: run[key] for key in _PLACES}}
    # From here the plan saves, and another plan goes on to the last step.
    shrunk = shrink(plan, workload)
    other = parse_layout(case.resumed)
    # Megatron pads the vocabulary to this number times the TP width, which the new plan changes.
    padding = shrunk.vocab_multiple // lcm(*other.tensor_parallel_widths)
    resumed = replace(
        shrunk,
        plan=plan_from_layout(other),
        # The same padded vocabulary; the later flag wins.
        model_args=(*shrunk.model_args, f"--make-vocab-size-divisible-by={padding}"),
    )
    # Save under one plan, resume under the other, beside one uninterrupted process.
    own = job_flags(replace(plan, workload=workload), workload, shrunk, STEPS)
    jobs = VerifyJobs(shrunk, options, folder.resolve(), own)
    before, after = jobs.interrupted_jobs(case.optimizer, resumed, SAVED_AT)
    reference = jobs.reference_job(case.optimizer)
    # Seed weights come first, and the second part needs the checkpoint of the first.
    for run in ([jobs.seed_job()], [before, reference], [after]):
        run_jobs(run, LIMIT_S)
    (one,) = records(reference)
    bounds = tolerances(shrunk.model, case.optimizer)

    # Each part of the run against the same steps of the process.
    def distances(job: Any, made: Any, steps: range) -> Distances:
        return compare(
            one,
            records(job),
            data_ranks(made.plan),
            shrunk.model,
            case.optimizer,
            steps,
            None,
            tensor_groups(made.plan),
            is_drawn_alike=is_drawn_alike(made.plan, shrunk.model),
        )

    parts = (
        distances(before, shrunk, range(1, SAVED_AT + 1)),
        distances(after, resumed, range(SAVED_AT + 1, STEPS + 1)),
    )

    # The name of the first weight that a part found unequal.
    def first(key: str) -> str | None:
        return next((found for part in parts if (found := getattr(part, key))), None)

    return {
        "ok": all(part.within(bounds) for part in parts),
        **{key: max(getattr(part, key).value for part in parts) for key in _KEYS},
        "tolerance": {key: getattr(bounds, key) for key in _KEYS},
        "unequal_initial_weights": first("unequal_start"),
        "unequal_holders": first("unequal_holder"),
    }
