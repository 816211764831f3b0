"""Train a generated case beside one process of stock Megatron, and measure the distance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hetero.errors import HeteroError
from megatron_hetero.lab.verify.distance.compare import (
    Distances,
    Tolerances,
    compare,
    tolerances,
)
from megatron_hetero.lab.verify.distance.half_precision import half_precision_tolerances
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.lab.verify.run import data_ranks, is_drawn_alike, records, tensor_groups
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.plan_generator import NUM_STEPS, SAVED_AT, Case

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Proof:
    """Distance of a case from one process: before the checkpoint, if it has one, and after it.

    `is_against_floor`: a bound was exceeded, and the measured floor of rounding decided.
    """

    case: Case
    parts: tuple[Distances, ...]
    bounds: Tolerances
    is_against_floor: bool = False
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and all(part.within(self.bounds) for part in self.parts)

    def __str__(self) -> str:
        lines = [self.case.name, f"  {dict(self.case.values)}"]
        lines += [f"  resumed as {self.case.second.layout}"] if self.case.second else []
        lines += [f"  {self.error}"] if self.error else []
        return "\n".join([*lines, *(f"  {part}" for part in self.parts), f"  {self.bounds}"])


def prove(case: Case, folder: Path, precision: Precision = "fp32") -> Proof:
    """Train `case` and one process from the same weights on the same samples.

    In half precision the one process is trained in fp32 as well, as `verify` does.
    """
    bounds = tolerances(case.model, case.optimizer)
    options = Options(steps=NUM_STEPS, optimizers=(case.optimizer,), precision=precision)

    def shrunk(plan: Plan) -> Shrunk:
        made = case.shrunk(plan)
        if precision == "fp32":
            return made
        # Below the rounding of half precision Adam's update would be its sign.
        return replace(made, model_args=(*made.model_args, "--adam-eps=1e-2"))

    jobs = VerifyJobs(shrunk(case.plan), options, folder)
    reference = jobs.reference_job(case.optimizer)
    try:
        run_jobs([jobs.seed_job()], TIMEOUT_S)
        if case.second is None:
            runs = [(jobs.plan_job(case.optimizer), case.plan, range(1, NUM_STEPS + 1))]
            run_jobs([runs[0][0], reference], TIMEOUT_S)
        else:
            before, after = jobs.interrupted_jobs(case.optimizer, shrunk(case.second), SAVED_AT)
            runs = [
                (before, case.plan, range(1, SAVED_AT + 1)),
                (after, case.second, range(SAVED_AT + 1, NUM_STEPS + 1)),
            ]
            run_jobs([before, reference], TIMEOUT_S)
            run_jobs([after], TIMEOUT_S)
        (one,) = records(reference)

        def measure(floor: RankRecord | None) -> Proof:
            parts = tuple(
                compare(
                    one,
                    records(job),
                    data_ranks(plan),
                    case.model,
                    case.optimizer,
                    steps,
                    floor,
                    tensor_groups(plan),
                    is_drawn_alike=is_drawn_alike(plan, case.model),
                )
                for job, plan, steps in runs
            )
            return Proof(case, parts, bounds)

        if precision != "fp32":
            single = jobs.fp32_job(case.optimizer, one.skipped)
            run_jobs([single], TIMEOUT_S)
            (in_fp32,) = records(single)
            bounds = half_precision_tolerances(one, in_fp32, case.model, case.optimizer)
            return measure(in_fp32)
        proof = measure(None)
        if not proof.ok:
            # As `verify` does: a bound that rounding itself does not keep proves nothing.
            floor = jobs.floor_job(case.optimizer)
            run_jobs([floor], TIMEOUT_S)
            proof = replace(measure(records(floor)[0]), is_against_floor=True)
        return proof
    except HeteroError as error:
        return Proof(case, (), bounds, error=str(error))
