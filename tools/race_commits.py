"""Step time of this tree beside another tree's, step by step in turns: paired ratios.

    git worktree add --detach OTHER f9cea4f2^
    python tools/race_commits.py OTHER                  # every case, 40 pairs of steps each
    python tools/race_commits.py OTHER --cases 'messages;overlap' --steps 100

Each case is a plan that trains over gloo with the runtime of both trees, from the same data with
the same flags, in processes of their own.  A step of the one is followed by a step of the other,
and the one that waits does nothing, so that both steps of a pair see the same machine.  The
interval is that of the median (order statistics, no assumption on the distribution).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_WARM_UP = 3
_NUM_TOKENS = 200_000
_LIMIT_S = 1800.0
_TREES = ("before", "after")
_OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


@dataclass(frozen=True)
class Case:
    """A plan as a layout, and the flags of its job beside the common ones."""

    layout: str
    flags: tuple[str, ...] = ()


CASES: Mapping[str, Case] = {
    "messages": Case("tp2:3,tp1:1 @4"),
    "deep": Case("tp1:1,tp1:1,tp2:2 @8"),
    "beside a replica": Case("tp2:3,tp1:1 @2 | tp1:4 @2"),
    "overlap": Case("tp2:3,tp1:1 @2 | tp1:4 @2", _OVERLAPS),
}


def main() -> None:
    """Print a row for each case; or be one of the two jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="the other tree")
    parser.add_argument("--cases", default=";".join(CASES), help="names with ; between them")
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps (default: 40)")
    parser.add_argument("--hidden", type=int, default=192, help="hidden size (default: 192)")
    parser.add_argument("--as", dest="job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        train(options.before, options.job, options.cases, options.steps, options.folder)
        return
    trees = options.before.resolve(), ROOT
    print("| case | layout | before | after | ratio | 95 % interval | pairs |")
    print("| --- | --- | --: | --: | --: | --- | --: |")
    for name in options.cases.split(";"):
        with tempfile.TemporaryDirectory(prefix="megatron-hetero-race-") as folder:
            print(row(name, trees, options.steps, options.hidden, Path(folder)), flush=True)


def row(name: str, trees: Sequence[Path], num_steps: int, hidden: int, folder: Path) -> str:
    """Race one case; return its row of the table.

    Args:
        name: of the case.
        trees: the other tree and this one.
        num_steps: pairs of steps, after a few to warm up.
        hidden: size.
        folder: for files.
    """
    from megatron_hetero.lab.kit.race import Race
    from megatron_hetero.lab.verify.small.text import tokenizer_arguments, write_text_dataset
    from megatron_hetero.plan.layout import parse_layout

    case, total = CASES[name], num_steps + _WARM_UP
    layout = parse_layout(case.layout)
    num_ranks = layout.num_devices
    write_text_dataset(folder / "text", _NUM_TOKENS)
    # One pipe for each rank to begin a step, and one for each job to say that a step is done.
    for job in _TREES:
        os.mkfifo(folder / f"{job}-done")
        for rank in range(num_ranks):
            os.mkfifo(folder / f"{job}-{rank}")
    flags = (
        *tokenizer_arguments(folder / "text"),
        *_flags(hidden, sum(replica.num_micro_batches for replica in layout.replicas)),
        *case.flags,
        f"--train-iters={total}",
        f"--hetero-layout={case.layout}",
    )
    (folder / "flags.json").write_text(json.dumps(flags))
    jobs = [
        _start(tree, job, num_ranks, total, folder)
        for tree, job in zip(trees, _TREES, strict=True)
    ]
    try:
        _take_turns(jobs, num_ranks, total, folder)
    finally:
        for started in jobs:
            if started.poll() is None:
                started.terminate()
            started.wait()
    times = [_slowest(folder, job, num_ranks) for job in _TREES]
    found = Race(*times)
    low, high = found.interval
    cells = (
        name,
        f"`{case.layout}`".replace(" | ", " \\| "),
        *(f"{sorted(own)[len(own) // 2] * 1e3:.1f} ms" for own in times),
        f"{found.ratio:.3f}",
        f"{low:.3f} to {high:.3f}",
        str(len(times[0])),
    )
    return f"| {' | '.join(cells)} |"


def _start(
    tree: Path, job: str, num_ranks: int, total: int, folder: Path
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, str(Path(__file__).resolve()), str(tree), "--as", job,
        "--cases", str(num_ranks), "--steps", str(total), "--folder", str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    log = (folder / f"{job}.log").open("wb")
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def _take_turns(
    jobs: Sequence[subprocess.Popen[bytes]], num_ranks: int, total: int, folder: Path
) -> None:
    """Let the jobs take a step in turns until both are done.

    Raises:
        SystemExit: a job ended before that.
    """
    # Opened for both ways, so that opening waits for nobody.
    done = [os.open(folder / f"{job}-done", os.O_RDWR | os.O_NONBLOCK) for job in _TREES]
    begin = [
        [os.open(folder / f"{job}-{rank}", os.O_RDWR) for rank in range(num_ranks)]
        for job in _TREES
    ]
    for _ in range(total):
        for job, pipes, ended in zip(jobs, begin, done, strict=True):
            for pipe in pipes:
                os.write(pipe, b"1")
            left = num_ranks
            limit_s = time.monotonic() + _LIMIT_S
            while left:
                try:
                    left -= len(os.read(ended, left))
                except BlockingIOError:
                    if job.poll() is not None or time.monotonic() > limit_s:
                        name = _TREES[jobs.index(job)]
                        log = (folder / f"{name}.log").read_text(errors="replace")
                        raise SystemExit(f"{name} ended early:\n{log[-2000:]}") from None
                    time.sleep(0.001)
    for job in jobs:
        job.wait(timeout=120)


def train(tree: Path, job: str, num_ranks: str, total: int, folder: Path) -> None:
    """Train with the runtime of `tree` on the CPU, local layers, one step at each turn."""
    import megatron_hetero
    from megatron_hetero.runtime import backend
    from megatron_hetero.runtime.job import entry

    try:
        from megatron_hetero.runtime.job.local.jobs import LocalJob
        from megatron_hetero.runtime.job.local.launch import run_jobs
        from megatron_hetero.runtime.job.local.loading import preload
    except ModuleNotFoundError:  # of an older tree
        from megatron_hetero.runtime.job.local_launch import LocalJob, preload, run_jobs

    # An installed package must not take the place of the tree.
    package = Path(str(megatron_hetero.__file__)).resolve().parents[1]
    if package != tree.resolve():
        raise SystemExit(f"the runtime is that of {package}, not of {tree}")
    preload()
    flags = json.loads((folder / "flags.json").read_text())

    def rank_of_job(rank: int) -> None:
        backend.activate_cpu_backend()
        pace = Pace(folder, job, rank)
        argv = (*flags, *backend.CPU_FLAGS, f"--data-cache-path={folder / job}-cache")
        os.chdir(folder)
        entry.main(argv, pace)
        (folder / f"{job}-{rank}.json").write_text(json.dumps(pace.times_s[:total]))

    run_jobs([LocalJob(job, int(num_ranks), rank_of_job, folder / job)], _LIMIT_S)


class Pace:
    """An observer of a run (`entry.Observer`) that begins a step when it is the job's turn."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        self._begin = os.open(folder / f"{job}-{rank}", os.O_RDONLY)
        self._done = os.open(folder / f"{job}-done", os.O_WRONLY)
        self.times_s: list[float] = []
        self._start_s = 0.0

    def observe_log(self) -> None:
        """Take the turns; the first one when the model is built."""
        from megatron_hetero.runtime.megatron import training_log

        training_log.add_observer(self._end_step)

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Wait for the first turn."""
        self._wait()
        return model

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        return provider

    def _wait(self) -> None:
        os.read(self._begin, 1)
        self._start_s = time.perf_counter()

    def _end_step(self, iteration: int, losses: dict[str, Any], norm: Any) -> None:
        self.times_s.append(time.perf_counter() - self._start_s)
        os.write(self._done, b"1")
        if not self._is_last(iteration):
            self._wait()

    def _is_last(self, iteration: int) -> bool:
        from megatron.training import get_args

        return bool(iteration >= get_args().train_iters)


def _slowest(folder: Path, job: str, num_ranks: int) -> tuple[float, ...]:
    """Return the seconds of every step after the first few, of the slowest rank."""
    ranks = [json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in range(num_ranks)]
    return tuple(max(times) for times in zip(*ranks, strict=True))[_WARM_UP:]


def _flags(hidden: int, batch: int) -> tuple[str, ...]:
    return (
        "--num-layers=4", f"--hidden-size={hidden}", "--num-attention-heads=4", "--seq-length=128",
        "--max-position-embeddings=128", "--attention-dropout=0", "--hidden-dropout=0",
        "--micro-batch-size=1", f"--global-batch-size={batch}", "--make-vocab-size-divisible-by=4",
        "--optimizer=adam", "--lr=3e-4", "--lr-decay-style=constant", "--log-interval=1",
        "--eval-iters=0", "--eval-interval=1000000", "--num-workers=0",
    )  # fmt: skip


if __name__ == "__main__":
    main()
