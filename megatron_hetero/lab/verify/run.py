"""Training of a plan beside one process of stock Megatron, and the distance between the two.

There are three jobs of forked processes: one makes the data set and the seed checkpoint with stock
Megatron, then one process of stock Megatron and the plan's processes train from it, both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from megatron_hetero.flags.support.of_plan import check_recompute
from megatron_hetero.flags.support.rules import given_arguments
from megatron_hetero.lab.verify.checks import check_alike, check_capacity, check_resumed
from megatron_hetero.lab.verify.distance.compare import (
    Distances,
    Tolerances,
    compare,
    rounding_of,
    tolerances,
)
from megatron_hetero.lab.verify.distance.half_precision import half_precision_tolerances
from megatron_hetero.lab.verify.distance.log import first_unlike_entry
from megatron_hetero.lab.verify.distance.measure import FLOOR_FACTOR
from megatron_hetero.lab.verify.options import HALF_PRECISION_EPSILON, Options
from megatron_hetero.lab.verify.outcome import Comparison as Comparison
from megatron_hetero.lab.verify.outcome import Routing as Routing
from megatron_hetero.lab.verify.outcome import Verification as Verification
from megatron_hetero.lab.verify.outcome import outcome_to_data as outcome_to_data
from megatron_hetero.lab.verify.processes.casts import start_rounding
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord, joined, read_record
from megatron_hetero.lab.verify.processes.routing import UNIT_ROUNDOFF, Flips
from megatron_hetero.lab.verify.small.job_flags import job_flags
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.lab.verify.time_left import TimeLeft
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.job.local.jobs import LocalJob, log_of
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.transformer_engine import layers
from megatron_hetero.schedule.stock import is_stock


def verify(
    plan: Plan,
    workload: Workload,
    options: Options,
    folder: Path,
    on_progress: Callable[[str], None] = lambda words: None,
) -> Verification:
    """Run the comparison; all files of the runs go into `folder`.

    Args:
        plan: the plan to verify.
        workload: the job, with its Megatron flags.
        options: steps, optimizers, precision and a planted error.
        folder: folder for everything that the runs write.
        on_progress: called often with the present activity, in words.
    Raises:
        UsageError: Megatron does not know a flag of the job.
        UnsupportedError: the runtime refuses a flag, or it cannot be compared.
        EnvironmentMismatchError: this machine's memory cannot hold the processes.
        RankFailedError: a process refused the job, or died.
    """
    # Small model and flags, and refusals before anything is started.
    shrunk = shrink(plan, workload)
    flags = job_flags(replace(plan, workload=workload), workload, shrunk, options.steps)
    given = given_arguments(last_of_each(flag_table().split(workload.megatron_args)))
    check_recompute(replace(plan, workload=workload), given)
    check_alike(workload, options)
    check_resumed(shrunk, workload, options)
    check_capacity(shrunk.plan.layout.num_devices + 1 + options.floor)
    jobs = VerifyJobs(shrunk, options, folder.resolve(), flags)
    time_left = TimeLeft(on_progress, sum(1 + options.resumes(o) for o in options.optimizers))
    _run([jobs.seed_job()], jobs, time_left, 1)
    compared = {o: _compare(jobs, o, time_left) for o in options.optimizers}
    trained = layers.said(workload.megatron_args)
    return Verification(shrunk, compared, flags, tuple(_notes(jobs, workload)), trained)


def _notes(jobs: VerifyJobs, workload: Workload) -> Iterator[str]:
    """Describe the differences from the job's own optimizer and precision."""
    training, options, shrunk = workload.training, jobs.options, jobs.shrunk
    for optimizer in options.optimizers:
        trained = jobs.precisions_of(optimizer)
        precision = " and ".join(sorted(trained))
        if optimizer != training.optimizer:
            second = ", as a second run" if len(options.optimizers) > 1 else ""
            yield f"{training.optimizer} -> {optimizer}, in {precision}{second}"
        elif trained != {training.precision}:
            yield f"{training.precision} -> {precision}"
        if trained != {"fp32"} and optimizer == "adam":
            yield f"--adam-eps -> {HALF_PRECISION_EPSILON} in {precision}"
        if jobs.mixes_precisions(optimizer):
            yield f"the one process casts where the plan does ({optimizer})"
    if options.resumes_after:
        yield f"saved, ended and resumed after step {options.resumes_after} (adam)"
    # Stock Megatron's divided optimizer is Adam's alone.
    divided = training.use_distributed_optimizer and is_stock(shrunk.plan)
    if divided and "sgd" in options.optimizers:
        yield (
            "SGD runs without --use-distributed-optimizer, in which stock Megatron, which runs "
            "this plan, has no SGD"
        )


def _compare(jobs: VerifyJobs, optimizer: str, time_left: TimeLeft) -> Comparison:
    """Train the plan and the single process with `optimizer` at the same time, and measure the
    distance.

    If a bound is exceeded, the floor of rounding decides, so it is then measured in any case.
    """
    # Replayed choices have to be made first; otherwise both run at once.
    of_plan, one = jobs.plan_jobs(optimizer), jobs.reference_job(optimizer)
    steps = jobs.options.steps
    first = jobs.options.resumes_after if len(of_plan) > 1 else steps
    if jobs.replays_routing(optimizer):
        _run([one], jobs, time_left)
        _run([of_plan[0]], jobs, time_left, first, of_plan=True)
    else:
        _run([of_plan[0], one], jobs, time_left, first, of_plan=True)
    # Others go on from the checkpoint of the first.
    for job in of_plan[1:]:
        _run([job], jobs, time_left, steps - first, of_plan=True)
    # Half precision has bounds of its own.
    model, bounds = jobs.shrunk.model, tolerances(jobs.shrunk.model, optimizer, True)
    if jobs.precisions_of(optimizer) != {"fp32"}:
        return _compare_in_half_precision(jobs, optimizer, of_plan, one, time_left)
    ranks, (reference,) = records_of_plan(of_plan), records(one)
    # Compare with the bounds of rounding.
    at = data_ranks(jobs.shrunk.plan)
    groups = tensor_groups(jobs.shrunk.plan)
    adam, alike = jobs.adam_settings(), is_drawn_alike(jobs.shrunk.plan, jobs.shrunk.model)
    log = _unlike_log(of_plan, one, bounds, jobs.options.resumes_after)
    distances = compare(reference, ranks, at, model, optimizer, None, None, groups, adam, alike)
    floor = None
    # Measure the floor if it is asked for, or if a bound is exceeded.
    if jobs.options.floor or not distances.within(bounds):
        job = jobs.floor_job(optimizer)
        _run([job], jobs, time_left)
        (reordered,) = records(job)
        floor = compare(reference, [reordered], [0], model, optimizer, adam=adam, starts_apart=True)
        distances = compare(
            reference, ranks, at, model, optimizer, None, reordered, groups, adam, alike
        )
    return _comparison(replace(distances, unlike_log=log), bounds, reference, ranks, floor)


def _unlike_log(
    of_plan: Sequence[LocalJob], one: LocalJob, bounds: Tolerances, resumed_after: int
) -> str | None:
    """Compare what the plan's last rank and the one process have printed."""
    # The second step behind each start, if there are two starts.
    averaged = (2, resumed_after + 2) if len(of_plan) > 1 else ()
    printed = "\n".join(log_of(job, job.num_ranks - 1) for job in of_plan)
    return first_unlike_entry(log_of(one, 0), printed, bounds.loss, averaged)


def _compare_in_half_precision(
    jobs: VerifyJobs,
    optimizer: str,
    of_plan: Sequence[LocalJob],
    one: LocalJob,
    time_left: TimeLeft,
) -> Comparison:
    """Measure the plan and one process, both in bf16 or fp16, against the same in fp32.

    No bound on the effect of rounding to 8 or 11 bits is both sound and tight, but its effect on
    the one process can be measured. The plan rounds the same numbers at other places, so it may be
    four times (`FLOOR_FACTOR`) as far from the one process as that one is from fp32.

    Where stages compute in unlike precisions, the one process casts where they do. If no stage is
    divided, the plan rounds the same numbers at the same places, and the floor is that of fp32: the
    one process in another order.
    """
    model, plan = jobs.shrunk.model, jobs.plan_of(optimizer)
    ranks, (reference,) = records_of_plan(of_plan), records(one)
    # The floor: another order of summation, or the same training in fp32.
    if jobs.rounds_alike(optimizer):
        job = jobs.floor_job(optimizer)
    else:
        job = jobs.fp32_job(optimizer, reference.skipped)
    _run([job], jobs, time_left)
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
        is_drawn_alike=is_drawn_alike(jobs.shrunk.plan, jobs.shrunk.model),
        rounding=start_rounding(plan, jobs.options.precision_of(optimizer)),
    )
    # Bounds, and the floor's own distance beside them.
    bounds = half_precision_tolerances(reference, single, model, optimizer, jobs.has_fp8)
    loss, gradients, norm, weights = rounding_of(reference, single, model, optimizer)
    rounding = replace(
        distances, loss=loss, gradients=gradients, gradient_norm=norm, weights=weights
    )
    routing = _routing(ranks, single, jobs.options.precision_of(optimizer))
    return replace(_comparison(distances, bounds, reference, ranks, rounding), routing=routing)


def _routing(ranks: Sequence[RankRecord], single: RankRecord, precision: str) -> Routing | None:
    """Compare the plan's choice of experts, which may differ as rounding moves scores."""
    if single.flips is None:
        return None
    # Of all ranks; the single process's own flips are what rounding does.
    flips = sum((r.flips for r in ranks if r.flips is not None), Flips())
    allowed = max(FLOOR_FACTOR * single.flips.margin, UNIT_ROUNDOFF[precision])
    return Routing(flips, allowed)


def _comparison(
    distances: Distances,
    bounds: Tolerances,
    reference: RankRecord,
    ranks: Sequence[RankRecord],
    floor: Distances | None,
) -> Comparison:
    # Only last stages have losses; all of them report the same one.
    losses = {step: loss for record in ranks for step, loss in record.losses.items()}
    return Comparison(
        distances,
        bounds,
        tuple((reference.losses[step], losses[step]) for step in sorted(losses)),
        floor,
        tuple(record.traffic for record in ranks if record.traffic is not None),
        tuple(record.boundaries for record in ranks),
    )


def is_drawn_alike(plan: Plan, model: ModelSpec) -> bool:
    """Tell if the ranks draw initial weights as one process does.

    They do not for experts under stock Megatron, which draws them itself, by their numbers on a
    rank.
    """
    return not (model.num_experts and is_stock(plan))


def records(job: LocalJob) -> list[RankRecord]:
    """Read the record of every rank of a job."""
    return [read_record(job.directory / f"record-{rank}") for rank in range(job.num_ranks)]


def records_of_plan(jobs: Sequence[LocalJob]) -> list[RankRecord]:
    """Read the record of every rank of a plan, whose training may be divided into two jobs."""
    parts = [records(job) for job in jobs]
    return [reduce(joined, of_rank) for of_rank in zip(*parts, strict=True)]


def _run(
    side_by_side: list[LocalJob],
    jobs: VerifyJobs,
    time_left: TimeLeft,
    num_steps: int | None = None,
    *,
    of_plan: bool = False,
) -> None:
    """Run jobs and show the progress of the first.

    Args:
        num_steps: steps of the first; None: those of the verification.
        of_plan: whether the first is one of the plan's runs.
    """
    steps = jobs.options.steps if num_steps is None else num_steps
    look = time_left.watch(side_by_side[0], steps, of_plan=of_plan)
    run_jobs(side_by_side, jobs.options.limit_s, look)


def tensor_groups(plan: Plan) -> list[list[int]]:
    """Return the ranks of each tensor-parallel group."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank, place in enumerate(rank_table(plan)):
        groups.setdefault((place.replica, place.stage, place.context_rank), []).append(rank)
    return list(groups.values())


def data_ranks(plan: Plan) -> list[int]:
    """Return, for each replica, the rank that reads the labels."""
    return [
        next(
            rank
            for rank, p in enumerate(rank_table(plan))
            if (p.replica, p.stage, p.tensor_rank, p.context_rank)
            == (r, len(replica.stages) - 1, 0, 0)
        )
        for r, replica in enumerate(plan.replicas)
    ]
