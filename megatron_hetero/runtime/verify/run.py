"""Train a plan and one process of stock Megatron side by side, and measure how far they are apart.

Three jobs of forked processes: one makes the data set and the seed checkpoint with stock Megatron,
then one process of stock Megatron and the plan's processes train from it, both at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.local_launch import Job, run_jobs
from megatron_hetero.runtime.traffic import BoundaryTraffic, Traffic
from megatron_hetero.runtime.verify.compare import (
    Distances,
    Tolerances,
    compare,
    half_precision_tolerances,
    rounding_of,
    tolerances,
)
from megatron_hetero.runtime.verify.jobs import Options, VerifyJobs
from megatron_hetero.runtime.verify.record import RankRecord, read_record
from megatron_hetero.runtime.verify.shrink import Shrunk, shrink
from megatron_hetero.runtime.verify.traffic import boundaries_to_data, sync_to_data

RANK_BYTES = 400 << 20
"""Memory to keep for each process; most of what a forked rank maps it shares with its parent."""
JOB_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Comparison:
    """One optimizer's runs.  `floor` is the distance of one process from itself.

    `losses` are (one process, plan) for each step.
    """

    distances: Distances
    bounds: Tolerances
    losses: tuple[tuple[float, float], ...]
    floor: Distances | None
    traffic: tuple[Traffic, ...] = ()
    """Of the plan's ranks."""
    boundaries: tuple[Mapping[int, BoundaryTraffic], ...] = ()
    """[rank] -> what it sent, by boundary."""

    @property
    def ok(self) -> bool:
        return self.distances.within(self.bounds)


@dataclass(frozen=True)
class Outcome:
    """What was trained, and how far it was apart, by optimizer."""

    shrunk: Shrunk
    comparisons: Mapping[str, Comparison]

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons.values())


def verify(
    plan: Plan,
    workload: Workload,
    options: Options,
    folder: Path,
    on_progress: Callable[[str, int], None] = lambda what, step: None,
) -> Outcome:
    """Run the comparison; everything that the runs write goes into `folder`.

    Args:
        on_progress: called often with what is running and the step it has reached.
    Raises:
        EnvironmentMismatchError: more processes than this machine's memory holds.
        RankFailedError: a process failed.
    """
    shrunk = shrink(plan, workload)
    check_capacity(shrunk.plan.layout.num_devices + 1 + options.floor)
    jobs = VerifyJobs(shrunk, options, folder.resolve())
    _run([jobs.seed_job()], on_progress)
    return Outcome(shrunk, {o: _compare(jobs, o, on_progress) for o in options.optimizers})


def check_capacity(num_processes: int) -> None:
    """Refuse a run that this machine's memory cannot hold.

    Raises:
        EnvironmentMismatchError: says how many processes fit.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(available // RANK_BYTES, 1)
    if num_processes > most:
        raise EnvironmentMismatchError(
            f"verifying this plan takes {num_processes} processes of about "
            f"{RANK_BYTES >> 20} MiB each; {available / 2**30:.1f} GiB are free here, enough for "
            f"{most}. Verify on a larger machine, or a plan for fewer devices."
        )


def _compare(
    jobs: VerifyJobs, optimizer: str, on_progress: Callable[[str, int], None]
) -> Comparison:
    """Train with `optimizer`, the plan and one process at once, and measure.

    Where a bound is not kept, the floor of rounding decides, so it is measured then in any case.
    """
    running = [jobs.plan_job(optimizer), jobs.reference_job(optimizer)]
    _run(running, on_progress)
    model, bounds = jobs.shrunk.model, tolerances(jobs.shrunk.model, optimizer)
    if jobs.options.precision != "fp32":
        return _compare_in_half_precision(jobs, optimizer, running, on_progress)
    ranks, (reference,) = [records(job) for job in running]
    at = data_ranks(jobs.shrunk.plan)
    groups = tensor_groups(jobs.shrunk.plan)
    distances = compare(reference, ranks, at, model, optimizer, tensor_groups=groups)
    floor = None
    if jobs.options.floor or not distances.within(bounds):
        job = jobs.floor_job(optimizer)
        _run([job], on_progress)
        (reordered,) = records(job)
        floor = compare(reference, [reordered], [0], model, optimizer)
        distances = compare(
            reference, ranks, at, model, optimizer, floor=reordered, tensor_groups=groups
        )
    return _comparison(distances, bounds, reference, ranks, floor)


def _compare_in_half_precision(
    jobs: VerifyJobs,
    optimizer: str,
    trained: list[Job],
    on_progress: Callable[[str, int], None],
) -> Comparison:
    """Measure the plan and one process, both `trained` in bf16 or fp16, against the same in fp32.

    How much rounding to 8 or 11 bits changes has no bound that is both sound and tight; what it
    changes of the one process can be measured.  The plan rounds the same numbers at other places,
    so it may be four times (`FLOOR_FACTOR`) as far from the one process as that one is from fp32.
    """
    model, plan = jobs.shrunk.model, jobs.shrunk.plan
    ranks, (reference,) = [records(job) for job in trained]
    job = jobs.fp32_job(optimizer, reference.skipped)
    _run([job], on_progress)
    (single,) = records(job)
    steps = range(1, len(reference.steps) + 1)
    distances = compare(
        reference,
        ranks,
        data_ranks(plan),
        model,
        optimizer,
        steps,
        single,
        tensor_groups(plan),
    )
    bounds = half_precision_tolerances(reference, single, model, optimizer)
    loss, gradients, norm, weights = rounding_of(reference, single, model, optimizer)
    rounding = replace(
        distances, loss=loss, gradients=gradients, gradient_norm=norm, weights=weights
    )
    return _comparison(distances, bounds, reference, ranks, rounding)


def _comparison(
    distances: Distances,
    bounds: Tolerances,
    reference: RankRecord,
    ranks: Sequence[RankRecord],
    floor: Distances | None,
) -> Comparison:
    losses = {step: loss for record in ranks for step, loss in record.losses.items()}
    return Comparison(
        distances,
        bounds,
        tuple((reference.losses[step], losses[step]) for step in sorted(losses)),
        floor,
        tuple(record.traffic for record in ranks if record.traffic is not None),
        tuple(record.boundaries for record in ranks),
    )


def records(job: Job) -> list[RankRecord]:
    """[rank] -> what it saw."""
    return [read_record(job.directory / f"record-{rank}") for rank in range(job.num_ranks)]


def _run(jobs: list[Job], on_progress: Callable[[str, int], None]) -> None:
    watched = jobs[0]
    log = watched.directory / f"rank-{watched.num_ranks - 1}.log"
    run_jobs(jobs, JOB_TIMEOUT_S, lambda: on_progress(watched.name, _steps_done(log)))


def _steps_done(log: Path) -> int:
    try:
        return log.read_text(errors="replace").count("elapsed time per iteration")
    except OSError:
        return 0


def tensor_groups(plan: Plan) -> list[list[int]]:
    """The ranks of each tensor-parallel group."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank, place in enumerate(rank_table(plan)):
        groups.setdefault((place.replica, place.stage, place.context_rank), []).append(rank)
    return list(groups.values())


def data_ranks(plan: Plan) -> list[int]:
    """For each replica the rank that reads the labels."""
    return [
        next(
            rank
            for rank, p in enumerate(rank_table(plan))
            if (p.replica, p.stage, p.tensor_rank, p.context_rank)
            == (r, len(replica.stages) - 1, 0, 0)
        )
        for r, replica in enumerate(plan.replicas)
    ]


def outcome_to_data(outcome: Outcome) -> dict[str, Any]:
    """`loss, gradients, gradient_norm, weights, tolerance, ok`, and what helps to read them.

    With several optimizers each number is the worst of them against its tolerance; `runs` has all.
    """
    plan = outcome.shrunk.plan
    runs = {o: _comparison_to_data(plan, c) for o, c in outcome.comparisons.items()}
    worst = {
        key: max(runs.values(), key=lambda run: run[key] / run["tolerance"][key])
        for key in _NUMBERS
    }
    return {
        **{key: run[key] for key, run in worst.items()},
        "tolerance": {key: run["tolerance"][key] for key, run in worst.items()},
        "ok": outcome.ok,
        "layout": format_layout(plan.layout),
        "shrunk": list(outcome.shrunk.changes),
        "runs": runs,
    }


_NUMBERS = ("loss", "gradients", "gradient_norm", "weights")


def _comparison_to_data(plan: Plan, comparison: Comparison) -> dict[str, Any]:
    d = comparison.distances
    return {
        **_values(d),
        "tolerance": {key: getattr(comparison.bounds, key) for key in _NUMBERS},
        "ok": comparison.ok,
        "same_samples": d.same_samples,
        "same_norm_bits_on_all_ranks": d.same_norm_bits,
        "same_random_states_in_groups": d.same_random_states,
        "same_loss_scales": d.same_loss_scales,
        "worst": {key: getattr(d, key).where for key in _NUMBERS},
        "left_out_of_weights": list(d.left_out),
        "losses": [{"one_process": a, "plan": b} for a, b in comparison.losses],
        "floor": None if comparison.floor is None else _values(comparison.floor),
        "gradient_sync": sync_to_data(comparison.traffic),
        "boundaries": boundaries_to_data(plan, comparison.boundaries),
    }


def _values(distances: Distances) -> dict[str, float]:
    return {key: getattr(distances, key).value for key in _NUMBERS}
