"""`--enable-ft-package`: each rank of a plan tells its monitor what one process tells its own.

The package needs its own launcher; a stand-in for its client writes down what it is told.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from megatron_hetero.runtime.job.checks import needs
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_runs import one_process_job, plan_job

STEPS = 18
"""Megatron sets the time of a step once it has seen 16."""


class _Client:
    """Substitute for `RankMonitorClient`: `told` has every call but those that read."""

    told: ClassVar[list[list[Any]]] = []
    section_timeouts = "none"

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.told.append([name, *given, named])

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.told)}


def _monitored(job: LocalJob, flags: list[str]) -> LocalJob:
    """The job with a monitor for each rank; `rank-R.told` has what it was told."""

    def train(rank: int) -> None:
        package = ModuleType("nvidia_resiliency_ext")
        package.fault_tolerance = ModuleType("nvidia_resiliency_ext.fault_tolerance")  # type: ignore[attr-defined]
        package.fault_tolerance.RankMonitorClient = _Client  # type: ignore[attr-defined]
        sys.modules[package.__name__] = package
        sys.modules["nvidia_resiliency_ext.fault_tolerance"] = package.fault_tolerance
        needs._is_installed = lambda name: True
        # Megatron reads the flags of the monitor from the command line itself.
        sys.argv = ["pretrain_gpt.py", *flags]
        try:
            job.function(rank)
        finally:
            (job.directory / f"rank-{rank}.told").write_text(json.dumps(_Client.told))

    return replace(job, function=train)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--calc-ft-timeouts"]], ids=["fixed", "measured"])
def test_every_rank_tells_its_monitor_what_one_process_does(
    extra: list[str], tmp_path: Path
) -> None:
    jobs = []
    for name, make in (("plan", plan_job), ("one", one_process_job)):
        folder = tmp_path / name
        flags = [
            "--enable-ft-package", "--ft-num-warmup-iters=2", f"--save={folder / 'save'}",
            "--save-interval=9", f"--train-iters={STEPS}", *extra,
        ]  # fmt: skip
        jobs.append(_monitored(make(folder, flags), flags))
    run_jobs(jobs, 120)
    ours, one = (
        [json.loads(path.read_text()) for path in sorted(job.directory.glob("*.told"))]
        for job in jobs
    )
    assert len(ours) == 4
    assert all(told == one[0] for told in ours)
    assert one[0].count(["start_section", "step", {}]) == STEPS - 2
    assert any(call[0] == "calculate_and_set_section_timeouts" for call in one[0]) == bool(extra)
