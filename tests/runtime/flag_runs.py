"""Small runs that show what a flag does: on a plan, and in one process of stock Megatron.

Both start from the same weights (drawn by global index) and read the same samples, so that whatever
a flag does to numbers can be compared without a checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.training import get_args

from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.model.initial_weights import initialise
from tests.runtime.workloads import plan

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"
SMALL = (
    "--num-layers=4", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=16",
    "--max-position-embeddings=16", "--micro-batch-size=1", "--global-batch-size=6", "--lr=1e-2",
    "--train-iters=3", "--tokenizer-type=NullTokenizer", "--vocab-size=100",
    "--eval-iters=0", "--eval-interval=1000", "--log-interval=1", "--num-workers=0",
    "--attention-dropout=0", "--hidden-dropout=0", "--lr-decay-style=constant", "--adam-eps=1e-3",
)  # fmt: skip
"""After clipping to a length of 1 a gradient's rounding is about 1e-7 at most: 1e-4 of the epsilon.
Megatron's own epsilon is less than the rounding, which then decides updates of whole steps where a
gradient is all but zero: stock's third loss at width 2 was seen 1.2e-5 off that of one process.
"""
_INSTEAD = {
    "--train-samples": "--train-iters",
    "--encoder-seq-length": "--seq-length",
    "--step-batch-size-schedule": "--global-batch-size",
}
_VOCABULARY = "--make-vocab-size-divisible-by"


class SameStart:
    """Draws the one process's weights as a plan's are (`runtime.model.initial_weights`)."""

    def observe_log(self) -> None:
        """Nothing: the log is read as it is printed."""

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Before the optimizer copies them."""
        initialise(model, get_args().seed)
        return model

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """The provider itself."""
        return provider


@dataclass(frozen=True)
class Log:
    """Lines that a run printed on its last rank."""

    text: str

    def numbers(self, pattern: str) -> list[float]:
        """The first group of every place that fits, as numbers."""
        return [float(found[1].replace(",", "")) for found in re.finditer(pattern, self.text)]

    @property
    def losses(self) -> list[float]:
        """Return the loss of each step."""
        return self.numbers(r"lm loss: (\S+) ")

    @property
    def norms(self) -> list[float]:
        """Return the norm of each step's gradient, before clipping."""
        return self.numbers(r"grad norm: (\S+) ")


def plan_job(
    folder: Path,
    flags: Sequence[str],
    layout: str | Plan = LAYOUT,
    data: Sequence[str] = ("--mock-data",),
) -> LocalJob:
    """The plan through the door that users take; its log is `read_log`'s."""
    asked = plan(layout) if isinstance(layout, str) else layout
    door = f"--hetero-layout={layout}"
    if isinstance(layout, Plan):
        save_plan(layout, folder.with_suffix(".plan.json"))
        door = f"--hetero-plan={folder.with_suffix('.plan.json')}"
    argv = [*_small(flags), *data, f"{_VOCABULARY}=4", f"--data-cache-path={folder / 'cache'}"]
    argv += flags

    def train(rank: int) -> None:
        _begin(folder)
        entry.main([*argv, door])

    return LocalJob(folder.name, asked.layout.num_devices, train, folder)


def one_process_job(
    folder: Path,
    flags: Sequence[str],
    layout: str = LAYOUT,
    data: Sequence[str] = ("--mock-data",),
    start: SameStart | None = None,
) -> LocalJob:
    """Stock Megatron in one process, with the vocabulary padded as under `layout`, from `start`."""
    multiple = 4 * max(plan(layout).layout.tensor_parallel_widths)
    argv = [
        *_small(flags), *data, f"{_VOCABULARY}={multiple}",
        f"--data-cache-path={folder / 'cache'}", *flags, *backend.CPU_FLAGS,
    ]  # fmt: skip

    def train(rank: int) -> None:
        backend.activate_cpu_backend()
        _begin(folder)
        entry.train_stock(argv, entry.World.from_environment(), start or SameStart())

    return LocalJob(folder.name, 1, train, folder)


def _small(flags: Sequence[str]) -> list[str]:
    """`SMALL`, without what is given by another name: the lengths of the job and of a sequence, and
    batches."""
    names = {flag.partition("=")[0] for flag in flags}
    replaced = {small for other, small in _INSTEAD.items() if other in names}
    return [f for f in SMALL if f.partition("=")[0] not in replaced]


def read_few_mock_documents() -> None:
    """Leave a hundredth of Megatron's mock data: to shuffle all of its samples takes longer than
    a small run."""
    MockGPTLowLevelDataset.size = 1000


def _begin(folder: Path) -> None:
    """Prepare a process for a run: other files, and Megatron's warnings, go beside its log.

    The test runner would otherwise keep the warnings.
    """
    read_few_mock_documents()
    save_without_a_server()
    os.chdir(folder)
    logging.basicConfig(level=logging.WARNING, force=True, stream=sys.stdout)


def read_log(job: LocalJob) -> Log:
    """The log of a job that has run."""
    path = job.directory / f"rank-{job.num_ranks - 1}.log"
    return Log(path.read_text(encoding="utf-8", errors="replace"))


def plan_and_one(
    folder: Path,
    flags: Sequence[str],
    layout: str = LAYOUT,
    data: Sequence[str] = ("--mock-data",),
) -> tuple[Log, Log]:
    """The logs of the plan and of the one process under the same flags, run side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = plan_job(folder / "plan", flags, layout, data)
    one = one_process_job(folder / "one", flags, layout, data)
    run_jobs([ours, one], 120)
    return read_log(ours), read_log(one)
