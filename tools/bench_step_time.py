"""Step time of symmetric plans against plain Megatron: paired ratios, median and 95 % interval.

    python tools/bench_step_time.py                 # every case, 40 pairs of steps each
    python tools/bench_step_time.py --cases 'DP;TP' --steps 100 --json

Two jobs train the same model from the same data with the same flags: plain Megatron, and a plan.
They take turns step by step, each waiting while the other works, so that a pair of steps sees the
same machine.  The time is that of the whole iteration of Megatron's loop, its log included.  A plan
that stock Megatron can express is handed over to it ("entry"); "forced" runs it in this project's
own groups, schedule, gradient sync and optimizer all the same, which shows what these cost.

The interval is that of the median (order statistics, no assumption on the distribution).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_hetero.lab.verify.small.text import tokenizer_arguments, write_text_dataset
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.arguments import HeteroArguments
from megatron_hetero.runtime.job.local_launch import LocalJob, run_jobs
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.megatron import training_log
from tests.runtime.schedules import with_interleaving

WARM_UP = 3
BATCH = 4


@dataclass(frozen=True)
class Case:
    """`layout` is symmetric; `stock` are the flags with which plain Megatron runs it."""

    layout: str
    stock: tuple[str, ...]
    common: tuple[str, ...] = ()
    is_interleaved: bool = False
    """Two model chunks of one layer on each of the two stages."""

    def plan(self) -> Plan:
        plan = plan_from_layout(parse_layout(self.layout))
        if not self.is_interleaved:
            return plan
        return with_interleaving(plan, 0, [(0, 1), (1, 1), (0, 1), (1, 1)])


_TP = ("--tensor-model-parallel-size=2",)
_ZERO = ("--use-distributed-optimizer",)
_OVERLAP = ("--overlap-grad-reduce",)
CASES = {
    "one rank": Case("tp1:4 @4", ()),
    "TP": Case("tp2:4 @4", _TP),
    "TP, SP": Case("tp2:4 @4", _TP, ("--sequence-parallel",)),
    "PP": Case("tp1:2,tp1:2 @4", ("--pipeline-model-parallel-size=2",)),
    "PP, chunks": Case(
        "tp1:2,tp1:2 @4",
        ("--pipeline-model-parallel-size=2", "--pipeline-model-parallel-layout=Et|t|t|tL"),
        is_interleaved=True,
    ),
    "DP": Case("tp1:4 @2 | tp1:4 @2", ()),
    "DP, overlap": Case("tp1:4 @2 | tp1:4 @2", (), _OVERLAP),
    "DP, ZeRO-1": Case("tp1:4 @2 | tp1:4 @2", (), _ZERO),
    "DP, gathers": Case("tp1:4 @2 | tp1:4 @2", (), (*_ZERO, *_OVERLAP, "--overlap-param-gather")),
}
ENTRIES = ("entry", "forced")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=";".join(CASES), help="names with ; between them")
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.cases.split(";")
    rows = []
    if not arguments.json:
        print(f"{'case':12} {'run as':7} {'plain':>9}  ratio  (95 % interval)  pairs")
    for name in names:
        for way in ENTRIES:
            row = measure(name, CASES[name], way, arguments.steps, arguments.hidden)
            rows.append(row)
            if not arguments.json:
                print(
                    f"{name:12} {way:7} {row['plain_ms']:6.1f} ms  {row['ratio']:.3f}  "
                    f"({row['low']:.3f} to {row['high']:.3f})  {row['pairs']}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps(rows, indent=1))


def measure(name: str, case: Case, way: str, num_steps: int, hidden: int) -> dict[str, Any]:
    """Train `case` both ways in turns."""
    plan = case.plan()
    num_ranks = plan.layout.num_devices
    with tempfile.TemporaryDirectory(prefix="bench-step-time-") as path:
        folder = Path(path)
        total = num_steps + WARM_UP
        flags = (*_flags(folder, total, hidden), *case.common)
        save_plan(plan, folder / "plan.json")
        run_jobs([LocalJob("data", 1, lambda rank: _write_data(folder), folder / "data")], 120)
        turns = Turns(num_ranks)

        def plain(rank: int) -> None:
            backend.activate_cpu_backend()
            cache = f"--data-cache-path={folder / 'plain'}"
            argv = (*flags, *case.stock, cache, *backend.CPU_FLAGS)
            observer = Pace(turns, 0, folder / f"plain-{rank}.json", total)
            entry.train_stock(argv, World.from_environment(), observer)
            observer.save()

        def on_the_plan(rank: int) -> None:
            cache = f"--data-cache-path={folder / 'plan'}"
            observer = Pace(turns, 1, folder / f"plan-{rank}.json", total)
            _train_plan(plan, folder / "plan.json", (*flags, cache), way, observer)
            observer.save()

        jobs = [
            LocalJob("plain", num_ranks, plain, folder / "plain"),
            LocalJob("plan", num_ranks, on_the_plan, folder / "plan"),
        ]
        run_jobs(jobs, 3600)
        plain_s, plan_s = (_steps(folder, job.name, num_ranks) for job in jobs)
    ratios = sorted(b / a for a, b in zip(plain_s, plan_s, strict=True))
    low, high = _median_interval(len(ratios))
    return {
        "case": name,
        "way": way,
        "pairs": len(ratios),
        "plain_ms": statistics.median(plain_s) * 1e3,
        "ratio": statistics.median(ratios),
        "low": ratios[low],
        "high": ratios[high],
    }


def _train_plan(plan: Plan, path: Path, flags: Sequence[str], way: str, observer: Pace) -> None:
    if way == "entry":
        entry.main((*flags, f"--hetero-plan={path}"), observer)
        return
    backend.activate_cpu_backend()
    arguments = HeteroArguments(None, path, "layout-independent", (*flags, *backend.CPU_FLAGS))
    entry.train_asymmetric(plan, arguments, World.from_environment(), observer)


class Turns:
    """Whose step it is: job 0's, then job 1's, all of their ranks.  Made before the ranks are."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = multiprocessing.Condition()
        self._done = [multiprocessing.Value("i", 0, lock=False) for _ in range(2)]

    def pass_on(self, job: int, num_steps: int, is_last: bool) -> None:
        """Wait, after `num_steps` steps of this rank, until its job may begin the next one."""
        with self._changed:
            self._done[job].value += 1
            self._changed.notify_all()
            if is_last and job == 1:
                return
            needed = (num_steps + job, num_steps)
            self._changed.wait_for(
                lambda: all(
                    done.value >= self._num_ranks * steps
                    for done, steps in zip(self._done, needed, strict=True)
                )
            )


class Pace:
    """An observer of a run (`entry.Observer`) that keeps its turns and the time of its steps."""

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


def _steps(folder: Path, job: str, num_ranks: int) -> list[float]:
    """Return the seconds of every step after the first few, of the slowest rank."""
    ranks = [json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in range(num_ranks)]
    return [max(times) for times in zip(*ranks, strict=True)][WARM_UP:]


def _median_interval(count: int) -> tuple[int, int]:
    """Places, in rising order, of a 95 % interval of the median of `count` values."""
    below = [math.comb(count, k) / 2**count for k in range(count + 1)]
    low = 0
    while low < count // 2 and sum(below[: low + 1]) <= 0.025:
        low += 1
    return max(low - 1, 0), min(count - low, count - 1)


def _flags(folder: Path, num_steps: int, hidden: int) -> tuple[str, ...]:
    return (
        *tokenizer_arguments(folder / "text"),
        "--num-layers=4",
        f"--hidden-size={hidden}",
        "--num-attention-heads=4",
        "--seq-length=128",
        "--max-position-embeddings=128",
        "--attention-dropout=0",
        "--hidden-dropout=0",
        "--micro-batch-size=1",
        f"--global-batch-size={BATCH}",
        "--make-vocab-size-divisible-by=4",
        f"--train-iters={num_steps}",
        "--optimizer=adam",
        "--lr=3e-4",
        "--lr-decay-style=constant",
        "--log-interval=1",
        "--eval-iters=0",
        "--eval-interval=1000000",
        "--num-workers=0",
    )


def _write_data(folder: Path) -> None:
    write_text_dataset(folder / "text", 200_000)


if __name__ == "__main__":
    main()
