"""What unlike precisions of single stages do to a training: loss curves beside one process.

    python tools/bench_precision.py [--steps 200] [--json]

One plan has stages in bf16, fp16 and fp32; beside it one process of stock Megatron trains in fp32,
bf16 and fp16.  All start from the same weights and read the same text in the same order: the
licence of this package, a byte a token, whose bytes never change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
import torch

from megatron_hetero.model.spec import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.local_launch import run_jobs
from tests.runtime.flag_runs import one_process_job, plan_job, read_log
from tests.runtime.workloads import plan

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
VOCABULARY = 257
"""256 bytes and the end of the text."""
LAYOUT = "tp1:2,tp1:2 @5 | tp1:4 @3"
PRECISIONS: tuple[tuple[Precision, ...], ...] = (("bf16", "fp16"), ("fp32",))
MODEL = (
    "--hidden-size=64", "--seq-length=64", "--max-position-embeddings=64", "--swiglu",
    "--position-embedding-type=rope", "--normalization=RMSNorm", "--disable-bias-linear",
    "--global-batch-size=8", "--lr=3e-3", "--lr-warmup-iters=10", "--clip-grad=1.0",
    f"--vocab-size={VOCABULARY}",
)  # fmt: skip
ONE_PROCESS: Mapping[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("--bf16",),
    "fp16": ("--fp16", "--initial-loss-scale=65536"),
}
MIXED = "bf16, fp16 and fp32 by stage"
SHOWN = 25
"""Steps whose mean loss is a row."""


def mixed_plan() -> Plan:
    """Return the plan, whose stages have `PRECISIONS`, [replica][stage]."""
    asked = plan(LAYOUT)
    replicas = [
        replace(
            replica,
            stages=tuple(
                replace(stage, precision=own)
                for stage, own in zip(replica.stages, row, strict=True)
            ),
        )
        for replica, row in zip(asked.replicas, PRECISIONS, strict=True)
    ]
    return replace(asked, replicas=tuple(replicas))


def write_text(prefix: Path) -> None:
    """Write the text as `prefix.bin` and `prefix.idx`."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCABULARY))
    builder.add_item(torch.from_numpy(numpy.array([*TEXT.read_bytes(), VOCABULARY - 1])))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")


def curves(steps: int, folder: Path) -> dict[str, list[float]]:
    """Train, and return the loss of each step: of the plan, and of one process by precision."""
    write_text(folder / "text")
    data = (f"--data-path={folder / 'text'}", "--split=1,0,0")
    flags = [*MODEL, f"--train-iters={steps}"]
    scale = ONE_PROCESS["fp16"][1:]
    jobs = {MIXED: plan_job(folder / "mixed", [*flags, "--bf16", *scale], mixed_plan(), data)}
    for name, own in ONE_PROCESS.items():
        jobs[name] = one_process_job(folder / name, [*flags, *own], LAYOUT, data)
    for job in jobs.values():
        run_jobs([job], 1800)
    return {name: read_log(job).losses for name, job in jobs.items()}


def distance(found: Sequence[float], other: Sequence[float]) -> float:
    """Return the root of the mean square of the distance of two curves."""
    return statistics.fmean((a - b) ** 2 for a, b in zip(found, other, strict=True)) ** 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="the losses of all steps")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        found = curves(options.steps, Path(made))
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    names = list(found)
    print("| steps | " + " | ".join(names) + " |")
    print("| --- |" + " --: |" * len(names))
    for first in range(0, options.steps, SHOWN):
        last = min(first + SHOWN, options.steps)
        means = (statistics.fmean(found[name][first:last]) for name in names)
        print(f"| {first + 1} to {last} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    print("\n| curve | distance from fp32 | largest of a step |")
    print("| --- | --: | --: |")
    for name in names:
        if name != "fp32":
            largest = max(abs(a - b) for a, b in zip(found[name], found["fp32"], strict=True))
            print(f"| {name} | {distance(found[name], found['fp32']):.4f} | {largest:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
