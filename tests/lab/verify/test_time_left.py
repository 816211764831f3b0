"""Words of a verification's progress: the step of its run, and the time that is left."""

from __future__ import annotations

from pathlib import Path

from megatron_hetero.lab.verify.time_left import TimeLeft
from megatron_hetero.runtime.job.local.jobs import LocalJob, log_path


def test_the_time_left_covers_the_runs_to_come(tmp_path: Path) -> None:
    """Two runs of 10 s for the start and 5 steps of 4 s; the clock and the logs are the test's."""
    now, said = 0.0, list[str]()
    time_left = TimeLeft(said.append, runs_left=2, clock=lambda: now)

    def run(name: str, *, of_plan: bool, num_steps: int = 5) -> list[str]:
        nonlocal now
        job = LocalJob(name, 2, lambda rank: None, tmp_path / name)
        job.directory.mkdir()
        look = time_left.watch(job, num_steps, of_plan=of_plan)
        said.clear()
        look()
        # The last rank prints Megatron's log.
        for step in range(num_steps):
            now += 4 if step else 14
            log_path(job, 1).write_text("elapsed time per iteration (ms)\n" * (step + 1))
            look()
        return [*said]

    assert run("seed", of_plan=False, num_steps=1) == ["seed: step 1 of 1", "seed: ending"]
    assert run("the plan, adam", of_plan=True) == [
        "the plan, adam: step 1 of 5",
        "the plan, adam: step 2 of 5",
        "the plan, adam: step 3 of 5, about 42 s left",
        "the plan, adam: step 4 of 5, about 38 s left",
        "the plan, adam: step 5 of 5, about 34 s left",
        "the plan, adam: ending, about 30 s left",
    ]
    assert run("the plan, sgd", of_plan=True)[0] == "the plan, sgd: step 1 of 5, about 30 s left"
    assert said[-1] == "the plan, sgd: ending, about 0 s left"
