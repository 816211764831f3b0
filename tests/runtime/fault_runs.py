"""A job that is killed at one place and started again, against the same job left alone.

    python -m tests.runtime.fault_runs --seeds 3        # every phase and kind of job, as a table
    python -m tests.runtime.fault_runs --seeds 3 --cases 1       # one more of its cases, then stop

A run starts from weights by global index, saves every two steps and keeps two checkpoints; the
seed chooses the killed rank and step.  Cases that are done are kept in a folder, so that runs of
hours can be made in pieces; the table is printed when none is left.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.lab.verify.small.text import write_text_dataset
from megatron_hetero.runtime.faults.drill import Drill
from megatron_hetero.runtime.faults.progress import OF_RANK_0, Phase
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.state import folders
from megatron_hetero.runtime.state.manifest import faults_of, read_manifest
from tests.runtime.runs import checkpoint_tensors
from tests.runtime.workloads import plan, workload

ASYMMETRIC, SYMMETRIC = "tp2:3,tp1:1 @4", "tp1:2,tp1:2 @4"
LAST, INTERVAL, LIMIT_S = 6, 2, 900
ZERO = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
"""Stock's other format has padding of any bits, which no two checkpoints share."""
KILLED = (
    Phase.START, Phase.GROUPS, Phase.WARM_UP, Phase.STEADY, Phase.COOL_DOWN, Phase.GRADIENT_SYNC,
    Phase.OPTIMIZER_STEP, Phase.SAVE_DATA, Phase.MANIFEST, Phase.RENAME, Phase.TRACKER,
    Phase.DELETE_OLD, Phase.VALIDATION,
)  # fmt: skip
"""The phases in which a rank is killed, in the order of a job."""
_OF_A_SAVE = (Phase.SAVE_DATA, Phase.MANIFEST, Phase.RENAME, Phase.TRACKER, Phase.DELETE_OLD)


@dataclass(frozen=True)
class FaultJob:
    """A small job on `layout`, whose files are in `folder`."""

    layout: str
    folder: Path
    zero: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def num_ranks(self) -> int:
        return plan(self.layout).layout.num_devices

    def arguments(self) -> list[str]:
        """Its flags; data and model are alike in every folder."""
        shared = self.folder.parent / "shared"
        shared.mkdir(parents=True, exist_ok=True)
        common = shrink(plan(self.layout), workload(per_token_loss=True, global_batch_size=4))
        jobs = VerifyJobs(common, Options(steps=LAST), shared)
        if not list(shared.glob("text*")):
            write_text_dataset(shared / "text", 4 * (LAST + 1) * 4 * (common.model.seq_length + 1))
        left_out = ("--load", "--finetune", "--no-load", "--exit-on", "--eval-", "--split")
        return [
            *(a for a in jobs.training_arguments("adam") if not a.startswith(left_out)),
            "--split=8,1,1",
            "--eval-iters=1",
            f"--eval-interval={INTERVAL}",
            f"--data-cache-path={shared / 'cache'}",
            f"--save={self.checkpoints}",
            f"--load={self.checkpoints}",
            f"--save-interval={INTERVAL}",
            "--hetero-keep-checkpoints=2",
            f"--hetero-layout={self.layout}",
            *(ZERO if self.zero else ()),
        ]

    def run(self, *more: str) -> str:
        """Run to the end and return the log of the last rank.

        Raises:
            RankFailedError: a rank died.
        """
        argv = [*self.arguments(), *more]

        def train(_rank: int) -> None:
            save_without_a_server()
            entry.main(argv)

        life = self.folder / f"life-{len(list(self.folder.glob('life-*')))}"
        run_jobs([LocalJob(life.name, self.num_ranks, train, life)], LIMIT_S)
        return (life / f"rank-{self.num_ranks - 1}.log").read_text()

    def log(self, rank: int = 0) -> str:
        """What a rank wrote in its newest life."""
        newest = max(self.folder.glob("life-*"), key=lambda path: int(path.name[5:]))
        return (newest / f"rank-{rank}.log").read_text()


def drill_of(phase: Phase, num_ranks: int, seed: int) -> Drill:
    """The kill of a seed: in a step after the first save, on any rank that comes to the phase."""
    draw = random.Random(f"{phase}/{seed}")
    rank = 0 if phase in OF_RANK_0 else draw.randrange(num_ranks)
    step = 0 if phase in (Phase.START, Phase.GROUPS) else draw.choice([3, 4, 5])
    if phase in _OF_A_SAVE:
        step = 6 if phase is Phase.DELETE_OLD else draw.choice([4, 6])
    return Drill("kill", rank, step, phase)


def torn(checkpoints: Path) -> list[str]:
    """What is wrong with the folders that have a checkpoint's name and a manifest."""
    if not checkpoints.is_dir():
        return []
    found = []
    for step in folders.complete_steps(checkpoints):
        folder = folders.step_folder(checkpoints, step)
        manifest = read_manifest(folder)
        found += [f"{step}: {fault}" for fault in faults_of(folder, manifest, manifest.files)]
    return found


def equal_checkpoints(one: Path, other: Path) -> bool:
    """Bit for bit, every tensor of both: weights, moments and random states."""
    a, b = checkpoint_tensors(one), checkpoint_tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def killed_and_resumed(job: FaultJob, drill: Drill, whole: FaultJob) -> list[str]:
    """Kill, resume, compare with the uninterrupted run: what is not as promised."""
    faults = []
    try:
        job.run(f"--hetero-drill={drill}")
        return ["nothing was killed"]
    except RankFailedError as error:
        # Another rank may notice the death, and end, before this process does.
        if "signal 9" not in str(error) and "is dead" not in str(error):
            return [str(error)]
    faults += torn(job.checkpoints)
    saved = folders.complete_steps(job.checkpoints) if job.checkpoints.is_dir() else []
    # The tracker follows the rename; a rank that died between them costs one more interval.
    tracker = job.checkpoints / folders.TRACKER
    resumed_at = int(tracker.read_text()) if tracker.exists() else 0
    if drill.step - resumed_at > INTERVAL + (drill.phase in _OF_A_SAVE):
        faults.append(f"killed in step {drill.step}, resumed at {resumed_at} of {saved}")
    job.run()
    faults += torn(job.checkpoints)
    last = folders.step_folder(job.checkpoints, LAST)
    if not equal_checkpoints(last, folders.step_folder(whole.checkpoints, LAST)):
        faults.append("the resumed run ends with other bits")
    return faults


@dataclass(frozen=True)
class Case:
    """One kill; `seed` chooses its rank and step."""

    layout: str
    zero: bool
    phase: Phase
    seed: int

    @property
    def job(self) -> str:
        """What the job is called in the table and in the folder."""
        kind = "asymmetric" if self.layout == ASYMMETRIC else "symmetric"
        return f"{kind}, ZeRO-1" if self.zero else kind


@dataclass(frozen=True)
class Row:
    """What a case found; nothing in `faults` where all was as promised."""

    job: str
    phase: str
    seed: int
    drill: str
    faults: list[str]

    @property
    def is_torn(self) -> bool:
        """Whether a folder with a checkpoint's name did not hold what was written."""
        return any("SHA-256" in fault or "bytes, written" in fault for fault in self.faults)


class Campaign:
    """Cases and what they found so far, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows = folder / "rows.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[Row]:
        """The cases that are done."""
        lines = self._rows.read_text().splitlines() if self._rows.exists() else []
        return [Row(**json.loads(line)) for line in lines]

    def run(self, case: Case) -> Row:
        """Run a case, after the whole run that it is compared with if that is not there yet."""
        base = self.folder / case.job.replace(", ", "-")
        whole = FaultJob(case.layout, base / "whole", case.zero)
        if not folders.step_folder(whole.checkpoints, LAST).is_dir():
            shutil.rmtree(whole.folder, ignore_errors=True)
            whole.run()
        job = FaultJob(case.layout, base / f"{case.phase}-{case.seed}", case.zero)
        shutil.rmtree(job.folder, ignore_errors=True)
        drill = drill_of(case.phase, job.num_ranks, case.seed)
        row = Row(
            case.job, case.phase, case.seed, str(drill), killed_and_resumed(job, drill, whole)
        )
        if not row.faults:
            shutil.rmtree(job.folder)
        with self._rows.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        return row


def table(rows: Sequence[Row]) -> str:
    """A line for each phase: of how many kills of each job all was as promised."""
    jobs = list(dict.fromkeys(row.job for row in rows))
    lines = [f"| killed in | {' | '.join(jobs)} | torn |", "| --- " * (len(jobs) + 2) + "|"]
    for phase in dict.fromkeys(row.phase for row in rows):
        cells = []
        for job in jobs:
            of_both = [row for row in rows if (row.phase, row.job) == (phase, job)]
            good = sum(not row.faults for row in of_both)
            cells.append(f"{good} of {len(of_both)}" if of_both else "not run")
        torn_ones = sum(row.is_torn for row in rows if row.phase == phase)
        lines.append(f"| {phase} | {' | '.join(cells)} | {torn_ones} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that are left, and print the table; the exit code is the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--phases", nargs="*", default=[phase.value for phase in KILLED])
    parser.add_argument("--folder", type=Path, default=Path("build/fault-runs"))
    parser.add_argument("--cases", type=int, help="run at most so many now; all without")
    asked = parser.parse_args(argv)
    campaign = Campaign(asked.folder)
    done = {(row.job, row.phase, row.seed): row for row in campaign.rows()}
    cases = [
        Case(layout, zero, Phase(phase), seed)
        for seed, layout, zero, phase in product(
            range(asked.seeds), (ASYMMETRIC, SYMMETRIC), (False, True), asked.phases
        )
    ]
    left = [case for case in cases if (case.job, case.phase.value, case.seed) not in done]
    for case in left[: asked.cases]:
        row = campaign.run(case)
        done[row.job, row.phase, row.seed] = row
        print(f"{row.job}, {row.drill}: {row.faults or 'well'}", file=sys.stderr, flush=True)
    num_left = max(0, len(left) - (len(left) if asked.cases is None else asked.cases))
    if num_left:
        print(f"{num_left} of {len(cases)} cases are left", file=sys.stderr)
        return 0
    rows = [done[case.job, case.phase.value, case.seed] for case in cases]
    print(table(rows))
    return sum(bool(row.faults) for row in rows)


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    sys.exit(min(code, 1))
