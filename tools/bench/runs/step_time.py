"""Step time of symmetric plans against plain Megatron: paired ratios, median and 95 % interval.

    python tools/bench step-time                 # every case, 40 pairs of steps each
    python tools/bench step-time --only DP TP --steps 100

Two jobs train the same model from the same data with the same flags: plain Megatron, and a plan.
They take turns step by step, each waiting while the other works, so that a pair of steps sees the
same machine.  The time is that of the whole iteration of Megatron's loop, its log included.  A plan
that stock Megatron can express is handed over to it ("entry"); "forced" runs it in this project's
own groups, schedule, gradient sync and optimizer all the same, which shows what these cost.

The interval is that of the median (order statistics, no assumption on the distribution).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.lab.kit.race import TEXT, race
from megatron_hetero.lab.verify.small.text import tokenizer_arguments
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tools.bench.show import Columns, option

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


def measure(name: str, case: Case, way: str, num_steps: int, hidden: int) -> dict[str, Any]:
    """Train `case` both ways in turns."""
    with tempfile.TemporaryDirectory(prefix="bench-step-time-") as path:
        folder = Path(path)
        flags = (*_flags(folder, hidden), *case.common)
        found = race(case.plan(), flags, case.stock, num_steps, folder, forced=way == "forced")
    low, high = found.interval
    return {
        "case": name,
        "way": way,
        "pairs": len(found.plain_s),
        "plain_ms": statistics.median(found.plain_s) * 1e3,
        "ratio": found.ratio,
        "low": low,
        "high": high,
    }


def _flags(folder: Path, hidden: int) -> tuple[str, ...]:
    return (
        *tokenizer_arguments(folder / TEXT),
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
        "--optimizer=adam",
        "--lr=3e-4",
        "--lr-decay-style=constant",
        "--log-interval=1",
        "--eval-iters=0",
        "--eval-interval=1000000",
        "--num-workers=0",
    )


COLUMNS = Columns({
    "case": "{case}", "run as": "{way}", "plain": "{plain_ms:.1f} ms", "ratio": "{ratio:.3f}",
    "95 % interval": "{low:.3f} to {high:.3f}", "pairs": "{pairs}",
})  # fmt: skip


OPTIONS = (
    option("--only", nargs="+", choices=list(CASES), default=CASES, metavar="CASE"),
    option("--steps", type=int, default=40, help="pairs of steps"),
    option("--hidden", type=int, default=192),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Race each case, by the entry and forced."""
    yield COLUMNS
    for name in given.only:
        for way in ENTRIES:
            yield measure(name, CASES[name], way, given.steps, given.hidden)
