"""What unlike precisions of single stages do to a training: loss curves beside one process.

    python tools/bench precision [--steps 200]

One plan has stages in bf16, fp16 and fp32; beside it one process of stock Megatron trains in fp32,
bf16 and fp16.  All start from the same weights and read the same text in the same order: the
licence of this package, a byte a token, whose bytes never change.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_runs import one_process_job, plan_job, read_log
from tests.runtime.workloads import plan
from tools.bench.jobs import ROOT
from tools.bench.show import Columns, option

TEXT = ROOT / "LICENSE"
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
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(found, other, strict=True)))


OPTIONS = (
    option("--steps", type=int, default=200),
    option("--curves", type=Path, metavar="FILE", help="the losses of all steps"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Train with the plan and with each precision."""
    with tempfile.TemporaryDirectory() as made:
        found = curves(given.steps, Path(made))
    if given.curves:
        given.curves.write_text(json.dumps(found, indent=1))
    yield Columns.of(("steps", *found))
    for first in range(0, given.steps, SHOWN):
        last = min(first + SHOWN, given.steps)
        means = (statistics.fmean(losses[first:last]) for losses in found.values())
        yield [f"{first + 1} to {last}", *(f"{mean:.4f}" for mean in means)]
    yield Columns.of(("curve", "distance from fp32", "largest of a step"))
    for name in found:
        if name != "fp32":
            largest = max(abs(a - b) for a, b in zip(found[name], found["fp32"], strict=True))
            yield [name, f"{distance(found[name], found['fp32']):.4f}", f"{largest:.4f}"]
