"""A healthy job trained for hours under the watch: how many false alarms it raises.

    python -m tests.runtime.calm_run --minutes 120

An asymmetric job on a CPU makes a step a second or so, is validated every ten steps, saves every
twenty, and announces one pause of 30 seconds.  A false alarm would end it with status 6.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from tests.runtime.fault_runs import ASYMMETRIC, FaultJob

REST_S, PAUSE_S, PAUSED_STEP = 1.0, 30.0, 60
VALIDATED, SAVED = 10, 20
"""Steps between two validations, and between two saves."""


def rest_between_steps(rest_s: float, pause_s: float) -> None:
    """Let this process rest before each of its steps, and announce one long pause."""
    begin_step = PROGRESS.begin_step

    def rested(step: int, phase: Phase) -> None:
        if step == PAUSED_STEP:
            with PROGRESS.pause():
                time.sleep(pause_s)
        time.sleep(rest_s)
        begin_step(step, phase)

    PROGRESS.begin_step = rested  # type: ignore[method-assign]


def calm_run(folder: Path, minutes: float, rest_s: float = REST_S) -> tuple[int, int, int, str]:
    """Train for some minutes; the steps, saves and validations, and what ended it early."""
    job = FaultJob(ASYMMETRIC, folder / "job")
    argv = [
        *job.arguments(),
        "--train-iters=1000000",
        "--lr-decay-iters=1000000",
        f"--exit-duration-in-mins={minutes:.0f}",
        f"--eval-interval={VALIDATED}",
        f"--save-interval={SAVED}",
    ]

    def train(_rank: int) -> None:
        save_without_a_server()
        rest_between_steps(rest_s, PAUSE_S)
        try:
            entry.main(argv)
        except SystemExit as left:  # Megatron leaves the process when its minutes are over
            if left.code:
                raise

    life, error = job.folder / "life-0", ""
    try:
        run_jobs([LocalJob(life.name, job.num_ranks, train, life)], 60 * minutes + 600)
    except RankFailedError as failed:
        error = str(failed)
    log = (life / f"rank-{job.num_ranks - 1}.log").read_text()
    first = (life / "rank-0.log").read_text()
    steps = [int(step) for step in re.findall(r"iteration +(\d+)/", log)]
    num_saves = len(re.findall(r"successfully saved checkpoint", first + log))
    num_validations = len(re.findall(r"validation loss at iteration", log))
    return max(steps, default=0), num_saves, num_validations, error


def main() -> int:
    """Print a table of one row; the exit code is 1 after an alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rest", type=float, default=REST_S, help="seconds between steps")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        steps, saves, validations, error = calm_run(Path(folder), asked.minutes, asked.rest)
    minutes = (time.monotonic() - began) / 60
    print("| minutes | steps | saves | validations | announced pauses of 30 s | false alarms |")
    print("| --- " * 6 + "|")
    pauses = int(steps >= PAUSED_STEP)
    print(f"| {minutes:.0f} | {steps} | {saves} | {validations} | {pauses} | {int(bool(error))} |")
    if error:
        print(error, file=sys.stderr)
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main())
