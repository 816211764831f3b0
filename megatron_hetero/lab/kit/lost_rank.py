"""A job that loses a rank: the others leave soon, and say which rank is lost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_hetero.errors import EXIT_RANK_DIED
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.verify.command import default_flags
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.job_flags import job_flags
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.runtime.faults.drill import Drill
from megatron_hetero.runtime.faults.progress import Phase
from megatron_hetero.runtime.job.local.jobs import LocalJob, log_of
from megatron_hetero.runtime.job.local.launch import run_jobs, run_without_rank

LAYOUT = "tp2:1,tp1:1 @3"
LOSSES: Mapping[str, Drill] = {
    "killed": Drill("kill", 1, 2, Phase.GRADIENT_SYNC),
    "stopped": Drill("freeze", 1, 2, Phase.GRADIENT_SYNC),
}
"""In the second step: the watch takes the first for one in which kernels are compiled."""
_STALL_S = 5
_STEPS = 4
_SEED_LIMIT_S, _LIMIT_S = 120.0, 150.0
_NAMED = re.compile(r"^error: rank (\d+) on .*$", re.MULTILINE)


@dataclass(frozen=True)
class Lost:
    """How the others ended: exit codes by rank, and the ranks that each named as lost."""

    rank: int
    codes: Mapping[int, int]
    named: Mapping[int, tuple[int, ...]]

    @property
    def ok(self) -> bool:
        """Tell if all others ended as of a lost rank, some named it, and none named another."""
        named = {rank for ranks in self.named.values() for rank in ranks}
        return set(self.codes.values()) == {EXIT_RANK_DIED} and named == {self.rank}

    @property
    def what(self) -> str:
        """Say how the others ended, in words."""
        ends = ", ".join(f"rank {rank} with {code}" for rank, code in sorted(self.codes.items()))
        named = sum(ranks == (self.rank,) for ranks in self.named.values())
        return f"ended: {ends}; {named} of {len(self.codes)} named rank {self.rank}"

    @property
    def data(self) -> dict[str, Any]:
        return {"codes": {str(rank): code for rank, code in self.codes.items()}}


def lose(how: str, machine: Machine, folder: Path) -> Lost:
    """Train until a rank is lost.

    Args:
        how: of `LOSSES`.
        machine: the GPUs of the machine, or none.
        folder: for the files of the runs.
    Raises:
        RankFailedError: the others did not end.
    """
    # A plan of two stages, whose ranks wait for each other within a step.
    drill, layout = LOSSES[how], parse_layout(LAYOUT)
    flags = (*default_flags(layout), "--transformer-impl=local")
    workload = load_workload(None, flags, is_planned=False)
    given = (f"--hetero-drill={drill}", f"--hetero-stall-limit={_STALL_S}")
    options = Options(steps=_STEPS, optimizers=("adam",), plan_flags=given)
    plan = plan_from_layout(layout, workload)
    shrunk = shrink(plan, workload)
    own = job_flags(replace(plan, workload=workload), workload, shrunk, _STEPS)
    jobs = VerifyJobs(shrunk, options, folder.resolve(), own)
    # The plan's ranks read their first weights from this checkpoint.
    run_jobs([jobs.seed_job()], _SEED_LIMIT_S)
    job: LocalJob = jobs.plan_job("adam")
    # The lost rank is left out: a stopped process never ends by itself.
    codes = dict(run_without_rank(job, drill.rank, _LIMIT_S))
    codes.pop(drill.rank, None)
    named = {rank: tuple(map(int, _NAMED.findall(log_of(job, rank)))) for rank in codes}
    return Lost(drill.rank, codes, named)
