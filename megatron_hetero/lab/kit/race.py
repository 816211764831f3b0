"""Race of the own runtime and stock Megatron on one symmetric job, step by step in turns.

Two jobs train the same model from the same data with the same flags: plain Megatron, and a plan.
They take turns step by step, each waiting while the other works, so that a pair of steps sees the
same machine.  The time is that of the whole iteration of Megatron's loop, its log included.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hetero.lab.kit.small_job import on_this_backend
from megatron_hetero.lab.verify.small.text import write_text_dataset
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.arguments import HeteroArguments
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.megatron import training_log
from megatron_hetero.runtime.transformer_engine import layers

WARM_UP = 3
TEXT = "text"
"""Name of the data set in the folder of a race."""
_NUM_TOKENS = 200_000


@dataclass(frozen=True)
class Race:
    """Seconds of each pair of steps, of the slowest rank: plain Megatron's and the plan's."""

    plain_s: tuple[float, ...]
    plan_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Return the times of the plan over those of plain Megatron, ascending."""
        return sorted(b / a for a, b in zip(self.plain_s, self.plan_s, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Return a 95 % interval of the median ratio, from order statistics, for any
        distribution."""
        low, high = _median_interval(len(self.plain_s))
        return self.ratios[low], self.ratios[high]


def race(
    plan: Plan,
    flags: Sequence[str],
    stock: Sequence[str],
    num_steps: int,
    folder: Path,
    *,
    forced: bool,
    limit_s: float = 3600.0,
) -> Race:
    """Train `plan` both ways in turns, `num_steps` pairs of steps after a few to warm up.

    Args:
        flags: Megatron's, of both runs; they read `folder / TEXT`, which is made here.
        stock: those with which plain Megatron runs the plan.
        forced: in this project's own groups, schedule, gradient sync and optimizer; else as the
            entry has it, which hands a plan of stock Megatron over to it.
        limit_s: seconds after which the race has failed.
    Raises:
        RankFailedError: a process refused the job, or died.
    """
    # One plan file and one data set for both.
    num_ranks, total = plan.layout.num_devices, num_steps + WARM_UP
    both = (*flags, f"--train-iters={total}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    save_plan(plan, path)
    run_jobs([LocalJob("data", 1, lambda rank: _write_data(folder), folder / "data")], 120)
    # The two jobs pass the turn to each other after each step.
    turns = Turns(num_ranks)

    def plain(rank: int) -> None:
        argv = (*both, *stock, f"--data-cache-path={folder / 'plain'}")
        observer = Pace(turns, 0, folder / f"plain-{rank}.json", total)
        entry.train_stock(_bridged(argv), World.from_environment(), observer)
        observer.save()

    def on_the_plan(rank: int) -> None:
        argv = (*both, f"--data-cache-path={folder / 'plan'}")
        observer = Pace(turns, 1, folder / f"plan-{rank}.json", total)
        if forced:
            arguments = HeteroArguments(None, path, "layout-independent", _bridged(argv))
            entry.train_asymmetric(plan, arguments, World.from_environment(), observer)
        else:
            entry.main((*argv, f"--hetero-plan={path}"), observer)
        observer.save()

    jobs = [
        LocalJob("plain", num_ranks, on_this_backend(plain), folder / "plain"),
        LocalJob("plan", num_ranks, on_this_backend(on_the_plan), folder / "plan"),
    ]
    run_jobs(jobs, limit_s)
    return Race(*(_steps(folder, job.name, num_ranks) for job in jobs))


def _bridged(argv: Sequence[str]) -> tuple[str, ...]:
    """Return `argv` for this process's GPU or, without a GPU, for the CPU."""
    if backend.cuda_is_usable():
        return tuple(argv)
    backend.activate_cpu_backend()
    return (*argv, *layers.cpu_flags(argv))


class Turns:
    """Turns of two jobs, step by step: job 0, then job 1, all ranks.  Made before the ranks are."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = multiprocessing.Condition()
        self._done = [multiprocessing.Value("i", 0, lock=False) for _ in range(2)]

    def pass_on(self, job: int, num_steps: int, is_last: bool) -> None:
        """Count this rank's `num_steps` steps; wait until its job may begin the next one."""
        with self._changed:
            self._done[job].value += 1
            self._changed.notify_all()
            # The second job's last step is the end of the race.
            if is_last and job == 1:
                return
            # Job 0 goes on after n steps of both; job 1 after n + 1 of job 0 and n of its own.
            needed = (num_steps + job, num_steps)
            self._changed.wait_for(
                lambda: all(
                    done.value >= self._num_ranks * steps
                    for done, steps in zip(self._done, needed, strict=True)
                )
            )


class Pace:
    """An observer of a run (`entry.Observer`) that keeps the run's turns and the time of the steps.
    """

    def __init__(self, turns: Turns, job: int, path: Path, num_steps: int) -> None:
        self._turns, self._job, self._path, self._num_steps = turns, job, path, num_steps
        self._times: list[float] = []
        self._start = time.perf_counter()

    def observe_log(self) -> None:
        training_log.add_observer(self._end_step)

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        return model

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        return provider

    def _end_step(self, iteration: int, losses: dict[str, Any], norm: Any) -> None:
        self._times.append(time.perf_counter() - self._start)
        self._turns.pass_on(self._job, iteration, is_last=iteration == self._num_steps)
        self._start = time.perf_counter()

    def save(self) -> None:
        self._path.write_text(json.dumps(self._times))


def _steps(folder: Path, job: str, num_ranks: int) -> tuple[float, ...]:
    """Return the seconds of every step after the first few, of the slowest rank."""
    # A row of seconds for each rank; a step lasts until the slowest rank has done it.
    ranks = [json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in range(num_ranks)]
    return tuple(max(times) for times in zip(*ranks, strict=True))[WARM_UP:]


def _median_interval(count: int) -> tuple[int, int]:
    """Places, in rising order, of a 95 % interval of the median of `count` values."""
    # below[k]: chance that exactly k of `count` values lie below the true median.
    below = [math.comb(count, k) / 2**count for k in range(count + 1)]
    low = 0
    # The widest interval whose tail below is at most 2.5 %; the tail above is its mirror.
    while low < count // 2 and sum(below[: low + 1]) <= 0.025:
        low += 1
    return max(low - 1, 0), min(count - low, count - 1)


def _write_data(folder: Path) -> None:
    write_text_dataset(folder / TEXT, _NUM_TOKENS)
