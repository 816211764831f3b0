"""Jobs whose ranks differ in one thing: all refuse and name it, or it is proved harmless.

    python -m tests.runtime.planted --starts 500 --seed 1
    python -m tests.runtime.planted --starts 50 --seed 1 --tcp    # met at a port of rank 0

A start is real: processes of one machine that parse, check and meet as in training.  Those that
agree train two steps, and end with the losses of a job without the difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.lab.verify.small.text import write_text_dataset
from megatron_hetero.plan.file import save_plan
from megatron_hetero.runtime.job import agreement, entry
from tests.runtime.started import NEVER, Start, start_ranks
from tests.runtime.workloads import plan, workload

LAYOUT, NUM_RANKS = "tp1:3,tp1:1 @3 | tp1:4 @3", 3
STEPS = 2


@dataclass(frozen=True)
class Difference:
    """One thing that `rank` has otherwise; `named` is found in every rank's message, or nothing is
    refused where it is empty."""

    kind: str
    rank: int
    named: str = ""
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    by_refusal: bool = False
    """The rank itself refuses, before it could be compared."""


class PlantedJob:
    """A small asymmetric job whose files are in `folder`."""

    def __init__(self, folder: Path, over_tcp: bool = False) -> None:
        self.folder, self.over_tcp = folder, over_tcp
        folder.mkdir(parents=True, exist_ok=True)
        small = shrink(plan(LAYOUT), workload(global_batch_size=6))
        self._jobs = VerifyJobs(small, Options(steps=STEPS), folder)
        left_out = ("--load", "--finetune", "--no-load", "--exit-on", "--use-checkpoint")
        self.flags = [
            a for a in self._jobs.training_arguments("adam") if not a.startswith(left_out)
        ]
        write_text_dataset(folder / "text", 6 * (STEPS + 1) * 4 * (small.model.seq_length + 1))
        (folder / "half.json").write_text('{"schema_version": 3, "replicas": [{"stages"')
        save_plan(plan(LAYOUT), folder / "plan.json")
        save_plan(plan(LAYOUT.replace("3,tp1:1", "2,tp1:2")), folder / "other.json")
        self._count = 0

    def argv(self, difference: Difference | None, rank: int) -> list[str]:
        """Return a rank's command line."""
        argv = [
            *self.flags,
            f"--data-cache-path={self.folder / 'cache'}",
            f"--hetero-plan={self.folder / 'plan.json'}",
        ]
        if difference is None or difference.rank != rank:
            return argv
        kept = [a for a in argv if a.partition("=")[0] not in difference.remove]
        return [*kept, *(a.replace("FOLDER", str(self.folder)) for a in difference.add)]

    def start(self, difference: Difference | None = None) -> Start:
        """Start all ranks and wait until they have ended."""
        self._count += 1
        folder = self.folder / f"start-{self._count}"
        folder.mkdir()
        versions = {} if difference is None else difference.versions
        planted = None if difference is None else difference.rank
        return start_ranks(
            NUM_RANKS,
            folder,
            lambda rank: _train(self.argv(difference, rank), versions if rank == planted else {}),
            over_tcp=self.over_tcp,
        )


def _train(argv: Sequence[str], versions: Mapping[str, str]) -> None:
    if versions:
        have = dict(agreement.agreed_versions())
        agreement.agreed_versions.cache_clear()
        agreement.agreed_versions = lambda: {**have, **versions}  # type: ignore[assignment]
    entry.main(argv)


def fault_of(found: Start, difference: Difference, alone: Start) -> str | None:
    """Return what is wrong with the end of a start; None if it is as it has to be.

    Args:
        found: the start.
        difference: what was planted.
        alone: the same job without it.
    """
    if NEVER in found.codes:
        return "hangs"
    if not difference.named:
        same = found.codes == (0,) * NUM_RANKS and found.losses == alone.losses
        return None if same and alone.losses else "is harmless, but the job ended otherwise"
    if 0 in found.codes:
        return "silent"
    if found.spread_s > 5.0:
        return f"the last rank left {found.spread_s:.1f} s after the first"
    for rank, log in enumerate(found.logs):
        if difference.named not in log:
            return f"rank {rank} does not name {difference.named}: {log[-400:]}"
        if f"rank {difference.rank}" not in log and not (
            difference.by_refusal and rank == difference.rank
        ):
            return f"rank {rank} does not name rank {difference.rank}: {log[-400:]}"
    return None


def drawn(seed: int) -> Difference:
    """Draw a difference."""
    draw = random.Random(f"planted/{seed}")
    rank = draw.randrange(NUM_RANKS)
    number = draw.randrange(2, 9)
    choices = kinds(rank, number)
    return draw.choice(choices[draw.choice(sorted(choices))])


def kinds(rank: int, number: int) -> dict[str, list[Difference]]:
    """Return all differences that can be drawn, by kind; `number` is for values."""

    def valued(kind: str, *pairs: tuple[str, str], refuses: bool = False) -> list[Difference]:
        return [
            Difference(kind, rank, name, (f"{name}={value}",), by_refusal=refuses)
            for name, value in pairs
        ]

    def planned(kind: str, *layouts: str) -> list[Difference]:
        named, instead = "layout of the plan", ("--hetero-plan",)
        return [
            Difference(kind, rank, named, (f"--hetero-layout={layout}",), instead)
            for layout in layouts
        ]

    number_flags = ("--lr", "--weight-decay", "--clip-grad", "--adam-beta1", "--init-method-std")
    count_flags = ("--train-iters", "--lr-warmup-iters", "--eval-interval", "--log-interval")
    switches = ("--swiglu", "--overlap-grad-reduce", "--use-distributed-optimizer", "--bf16")
    stages = "tp1:1,tp1:3 @3 | tp1:4 @3", "tp1:4 @3 | tp1:3,tp1:1 @3", "tp1:2,tp1:1,tp1:1 @6"
    no_effect = (
        ("--data-cache-path=FOLDER/another-cache",),
        ("--num-workers=1",),
        ("--lr-wsd-decay-style", "exponential"),
        ("--weight-decay-incr-style=constant", "--num-workers=1"),
    )
    other = "--hetero-plan=FOLDER/other.json"
    half, world = "--hetero-plan=FOLDER/half.json", "--hetero-layout=tp1:2,tp1:2 @6"
    replaced = ("--hetero-plan",)
    return {
        "plan": planned("plan", *stages),
        "plan file": [Difference("plan file", rank, "layout of the plan", (other,))],
        "half-written plan": [
            Difference("half-written plan", rank, "half.json", (half,), by_refusal=True)
        ],
        "counts": planned("counts", *(f"tp1:3,tp1:1 @{a} | tp1:4 @{6 - a}" for a in (1, 2, 4, 5))),
        "number of processes": [
            Difference(
                "number of processes", rank, "WORLD_SIZE", (world,), replaced, by_refusal=True
            )
        ],
        "a number": valued("a number", *((name, f"0.0{number}1") for name in number_flags)),
        "a count": valued("a count", *((name, str(number + 40)) for name in count_flags)),
        "a switch": [Difference("a switch", rank, name, (name,)) for name in switches],
        "a choice": valued(
            "a choice",
            ("--lr-decay-style", "cosine"),
            ("--normalization", "RMSNorm"),
            ("--position-embedding-type", "rope"),
            ("--optimizer", "sgd"),
        ),
        "seeds": valued("seeds", ("--seed", str(number + 5000))),
        "our own flag": valued(
            "our own flag",
            ("--hetero-init", "megatron"),
            ("--hetero-stall-limit", "77"),
            ("--hetero-keep-checkpoints", "3"),
        ),
        "refused flag": valued(
            "refused flag",
            ("--expert-model-parallel-size", "2"),
            ("--hybrid-layer-pattern", "M*"),
            refuses=True,
        ),
        "versions": [
            Difference("versions", rank, f"version of {name}", versions={name: f"9.{number}"})
            for name in ("megatron_hetero", "megatron-core", "torch")
        ],
        "harmless": [Difference("harmless", rank, "", added) for added in no_effect],
    }


def main() -> None:
    """Plant differences and print a table; exit with 1 if one is silent or hangs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tcp", action="store_true", help="meet at a port of rank 0")
    asked = parser.parse_args()
    tried, wrong = Counter[str](), Counter[str]()
    worst, longest = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        job = PlantedJob(Path(folder), asked.tcp)
        alone = job.start()
        for i in range(asked.starts):
            difference = drawn(asked.seed * 1_000_000 + i)
            found = job.start(difference)
            fault = fault_of(found, difference, alone)
            tried[difference.kind] += 1
            if fault is not None:
                wrong[difference.kind] += 1
                print(f"{difference}: {fault}", file=sys.stderr, flush=True)
            spread = max(worst.get(difference.kind, 0.0), found.spread_s)
            worst[difference.kind] = spread
            whole = max(longest.get(difference.kind, 0.0), found.seconds)
            longest[difference.kind] = whole
    print("| differs | starts | silent, hanging or misnamed | last rank after the first, at most | "
          "whole start, at most |")  # fmt: skip
    print("| --- | --: | --: | --: | --: |")
    for kind in sorted(tried):
        row = f"{tried[kind]} | {wrong[kind]} | {worst[kind]:.1f} s | {longest[kind]:.1f} s"
        print(f"| {kind} | {row} |")
    whole = f"{max(worst.values()):.1f} s | {max(longest.values()):.1f} s"
    print(f"| all | {sum(tried.values())} | {sum(wrong.values())} | {whole} |")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
