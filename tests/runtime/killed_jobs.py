"""Real jobs of which a rank is killed or stopped in a phase: who is named, by whom, and how soon.

    python -m tests.runtime.killed_jobs --tries 10                # forked ranks, each phase
    python -m tests.runtime.killed_jobs --tries 1 --tcp           # met at a port of rank 0
    python -m tests.runtime.killed_jobs --tries 1 --torchrun      # the same under torchrun

Every survivor has to leave with status 6 and one line that names the rank.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.errors import EXIT_RANK_DIED
from megatron_hetero.runtime.faults.progress import OF_RANK_0, Phase
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from tests.runtime.fault_runs import FaultJob
from tests.runtime.started import start_ranks

LAYOUTS = (
    "tp2:3,tp1:1 @3 | tp1:4 @1",
    "tp1:2,tp1:1,tp1:1 @3 | tp2:3,tp1:1 @1",
    "tp1:1,tp1:3 @2 | tp2:2,tp2:2 @1 | tp2:4 @1",
)
"""Of 4, 6 and 8 ranks."""
_STEADY = ("tp3:3,tp1:1 @4", "tp4:3,tp2:1 @4", "tp4:2,tp2:1,tp1:1 @4")
"""With so many micro-batches that every rank is in steady state at some time."""
PHASES = (
    Phase.GROUPS, Phase.SETUP, Phase.WARM_UP, Phase.STEADY, Phase.GRADIENT_SYNC,
    Phase.OPTIMIZER_STEP, Phase.SAVE_DATA, Phase.VALIDATION,
)  # fmt: skip
_NAMED = re.compile(r"^error: rank (\d+) on .*$", re.MULTILINE)


@dataclass(frozen=True)
class Killed:
    """What the survivors of one job did, in order of rank; `seconds` from the fault to the last.

    `codes` is empty under torchrun, which keeps the codes of its processes to itself.
    """

    phase: Phase
    rank: int
    codes: tuple[int, ...]
    named: tuple[tuple[str, ...], ...]
    seconds: float

    @property
    def num_right(self) -> int:
        return sum(names == (str(self.rank),) for names in self.named)

    @property
    def is_right(self) -> bool:
        """Whether a line names the rank and none names another."""
        found = {name for names in self.named for name in names}
        return found == {str(self.rank)}


def kill_one(
    folder: Path,
    phase: Phase,
    seed: int,
    torchrun: bool = False,
    fault: str = "kill",
    over_tcp: bool = False,
) -> Killed:
    """Train a job on a layout of the seed, with a fault at a rank and step of the seed.

    Args:
        folder: for the job's files.
        phase: the phase of the fault.
        seed: chooses layout, rank and step.
        torchrun: start the ranks with it.
        fault: `kill` or `freeze`.
        over_tcp: as of `start_ranks`.
    """
    draw = random.Random(f"killed/{phase}/{seed}")
    layouts = _STEADY if phase is Phase.STEADY else LAYOUTS
    job = FaultJob(draw.choice(layouts), folder / f"{phase.value}-{seed}-{int(torchrun)}")
    job.folder.mkdir()
    rank = 0 if phase in OF_RANK_0 else draw.randrange(job.num_ranks)
    step = 0 if phase in (Phase.GROUPS, Phase.SETUP) else draw.choice([2, 3, 4])
    if phase is Phase.SAVE_DATA:
        step = 2
    argv = [*job.arguments(), f"--hetero-drill={fault}@{rank}:{step}:{phase.value}"]
    if torchrun:
        return _under_torchrun(job, argv, phase, rank)

    def train(_rank: int) -> None:
        save_without_a_server()
        entry.main(argv)

    stays = rank if fault == "freeze" else None
    found = start_ranks(job.num_ranks, job.folder, train, stays, over_tcp)
    others = [r for r in range(job.num_ranks) if r != rank]
    named = tuple(tuple(_NAMED.findall(found.logs[r])) for r in others)
    return Killed(phase, rank, tuple(found.codes[r] for r in others), named, found.spread_s)


def _under_torchrun(job: FaultJob, argv: list[str], phase: Phase, rank: int) -> Killed:
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={job.num_ranks}",
        "--master-addr=127.0.0.1", f"--master-port={random.randrange(20000, 60000)}",
        "--log-dir", str(job.folder / "logs"), "--redirects", "3",
        "-m", "megatron_hetero.pretrain_gpt", *argv,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    happened = 0.0
    while run.poll() is None:
        logs = list((job.folder / "logs").rglob("stdout.log"))
        if not happened and any(" happens" in log.read_text(errors="replace") for log in logs):
            happened = time.monotonic()
        time.sleep(0.05)
    seconds = time.monotonic() - happened
    said = {
        int(log.parent.name): log.read_text(errors="replace")
        for log in (job.folder / "logs").rglob("stderr.log")
    }
    others = [r for r in sorted(said) if r != rank]
    named = tuple(tuple(_NAMED.findall(said[r])) for r in others)
    return Killed(phase, rank, (), named, seconds)


def main() -> None:
    """Print a table; exit with 1 if a job names a wrong rank or none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--fault", choices=("kill", "freeze"), default="kill")
    parser.add_argument("--phases", nargs="*", type=Phase, default=PHASES)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wrong = 0
    print("| killed in | jobs | right rank named | survivors' lines | status 6 | all out within |")
    print("| --- | --: | --: | --: | --: | --: |")
    for phase in asked.phases:
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                kill_one(Path(folder), phase, seed, asked.torchrun, asked.fault, asked.tcp)
                for seed in range(asked.tries)
            ]
        for run in runs:
            if run.num_right < len(run.named) or set(run.codes) - {EXIT_RANK_DIED}:
                print(run, file=sys.stderr, flush=True)
        right, lines = sum(run.is_right for run in runs), sum(run.num_right for run in runs)
        survivors = sum(len(run.named) for run in runs)
        status = sum(run.codes.count(EXIT_RANK_DIED) for run in runs)
        statuses = "not told" if asked.torchrun else f"{status} of {survivors}"
        worst = max(run.seconds for run in runs)
        wrong += len(runs) - right
        print(
            f"| {phase.value} | {len(runs)} | {right} | {lines} of {survivors} | "
            f"{statuses} | {worst:.1f} s |",
            flush=True,
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
