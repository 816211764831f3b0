"""Bits flipped and files cut off in a job's checkpoint: which checkpoint a job then goes on from.

    python -m tests.runtime.flip_runs --count 500       # a table by file

The newest checkpoint of a real job is damaged in one place at a time, in each of its files in
turn.  What a job would load is asked of the function that jobs ask (`state.choosing.sound_step`);
for a few of them the job is started, and its end compared with that of the job left alone.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_hetero.errors import CheckpointError
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.state import folders
from megatron_hetero.runtime.state.choosing import sound_step
from tests.runtime.fault_runs import ASYMMETRIC, LAST, FaultJob, equal_checkpoints

BEFORE = LAST - 2
"""The step of the checkpoint before the damaged one."""


@dataclass(frozen=True)
class Damage:
    """One bit of a file changed, or the file cut off; `at` counts bits or bytes."""

    file: str
    is_cut: bool
    at: int

    def broken(self, data: bytes) -> bytes:
        """The file's content with the damage."""
        if self.is_cut:
            return data[: self.at]
        changed = bytearray(data)
        changed[self.at // 8] ^= 1 << self.at % 8
        return bytes(changed)


@dataclass(frozen=True)
class Decision:
    """The step that a job would load after a damage; None where it would load nothing."""

    damage: Damage
    step: int | None


def damages(folder: Path, count: int, seed: int = 20) -> Iterator[Damage]:
    """Flips and cuts by turns, in each file of a checkpoint by turns, at drawn places."""
    draw = random.Random(seed)
    files = [path for path in sorted(folder.iterdir()) if path.stat().st_size]
    for number in range(count):
        path = files[number % len(files)]
        size = path.stat().st_size
        is_cut = number // len(files) % 2 == 1
        yield Damage(path.name, is_cut, draw.randrange(size if is_cut else 8 * size))


def decisions(checkpoints: Path, count: int, work: Path) -> list[Decision]:
    """What a job would load after each of `count` damages to the newest checkpoint."""
    result = work / "decisions.json"

    def decide(_rank: int) -> None:
        import torch.distributed as dist

        backend.activate_cpu_backend()
        world = World.from_environment()
        dist.init_process_group("gloo", store=world.store(), rank=world.rank, world_size=1)
        newest = folders.step_folder(checkpoints, LAST)
        found = []
        for damage in list(damages(newest, count)):
            path = newest / damage.file
            data = path.read_bytes()
            path.write_bytes(damage.broken(data))
            try:
                # None: the one that the tracker names, which is the damaged one.
                step = sound_step(checkpoints, None, may_fall_back=True) or LAST
            except CheckpointError:
                step = None
            path.write_bytes(data)
            found.append((asdict(damage), step))
        result.write_text(json.dumps(found))

    run_jobs([LocalJob("decisions", 1, decide, work)], 600)
    return [Decision(Damage(**damage), step) for damage, step in json.loads(result.read_text())]


def table(found: Sequence[Decision]) -> str:
    """A line for each file."""
    lines = ["| file | bits flipped | cut off | loaded | the one before is loaded |"]
    lines.append("| --- " * 5 + "|")
    sums: Counter[str] = Counter()
    for name in [*dict.fromkeys(d.damage.file for d in found), "all"]:
        these = [d for d in found if name in (d.damage.file, "all")]
        sums["cut"] = sum(d.damage.is_cut for d in these)
        sums["loaded"] = sum(d.step == LAST for d in these)
        sums["before"] = sum(d.step == BEFORE for d in these)
        flips = len(these) - sums["cut"]
        lines.append(f"| {name} | {flips} | {sums['cut']} | {sums['loaded']} | {sums['before']} |")
    return "\n".join(lines)


def started(whole: FaultJob, damage: Damage, number: int) -> list[str]:
    """Start a job on a damaged copy of its checkpoints: what is not as promised."""
    job = FaultJob(whole.layout, whole.folder.parent / f"started-{number}", whole.zero)
    shutil.copytree(whole.checkpoints, job.checkpoints)
    newest = folders.step_folder(job.checkpoints, LAST)
    path = newest / damage.file
    path.write_bytes(damage.broken(path.read_bytes()))
    job.run()
    log, faults = job.log(), []
    if f"{newest} is refused:" not in log or damage.file not in log:
        faults.append("the file was not named")
    if f"{folders.step_folder(job.checkpoints, BEFORE)} is whole and is loaded" not in log:
        faults.append("the checkpoint before was not loaded")
    if not equal_checkpoints(newest, folders.step_folder(whole.checkpoints, LAST)):
        faults.append("the job ends with other bits")
    return [f"{damage}: {fault}" for fault in faults]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; the exit code is 1 if a damaged checkpoint was loaded, or none was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--starts", type=int, default=4, help="of them with a whole job")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        whole = FaultJob(ASYMMETRIC, Path(temporary) / "whole", zero=True)
        whole.run()
        newest = folders.step_folder(whole.checkpoints, LAST)
        chosen = list(damages(newest, asked.count))[:: max(1, asked.count // max(1, asked.starts))]
        faults: list[str] = []
        for number, damage in enumerate(chosen[: asked.starts]):
            faults += started(whole, damage, number)
        found = decisions(whole.checkpoints, asked.count, Path(temporary) / "work")
    print(table(found))
    num = len(chosen[: asked.starts])
    print("\n| jobs started | files refused, the one before loaded, the same bits at the end |")
    print(f"| --- | --- |\n| {num} | {num - len({f.partition(')')[0] for f in faults})} |")
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults) or any(d.step != BEFORE for d in found))


if __name__ == "__main__":
    sys.exit(main())
