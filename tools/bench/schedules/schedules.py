"""What each schedule gains on uneven pipelines over slow hops: simulated, and really run.

    python tools/bench schedules                 # the simulated table, seconds
    python tools/bench schedules --run           # also runs every plan at a hop of one period

A period is the slowest stage's forward and backward.  A run is the runtime's executor on one
process a stage (`tools/sleeping_pipeline.py`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.orders.list_schedule import TimedPipeline
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts, one_f_one_b
from megatron_hetero.schedule.orders.synthesise import synthesise
from megatron_hetero.schedule.orders.zero_bubble import zero_bubble
from megatron_hetero.schedule.parts import ChunkTimes
from megatron_hetero.schedule.programme import Schedule
from megatron_hetero.schedule.simulator.pipeline import simulate
from tools.bench.show import Columns, option

HOPS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Latency of the slow hop, in periods."""


@dataclass(frozen=True)
class Case:
    """Stage times (forward + backward of one micro-batch, in periods) and the slow hop's place."""

    name: str
    times: tuple[float, ...]
    slow: int


CASES = (
    Case("even", (1.0, 1.0, 1.0, 1.0), 1),
    Case("fast second half", (1.0, 1.0, 0.7, 0.7), 1),
    Case("slow middle", (0.6, 1.0, 0.8), 0),
    Case("slow ends", (1.0, 0.5, 0.5, 1.0), 2),
    Case("five stages", (0.4, 1.0, 0.7, 0.9, 0.5), 2),
)
SCHEDULES = (
    "1F1B",
    "HARP's steps",
    "launch counts",
    "interleaved",
    "zero-bubble",
    "synthesised",
    "synthesised, 2x memory",
)


def pipeline(case: Case, hop: float, num_micro_batches: int, num_chunks: int = 1) -> TimedPipeline:
    """Make a pipeline in which a third of each stage's time is forward, a third each part of
    backward; hops are latency."""
    num_stages = len(case.times)
    chain = tuple(range(num_stages)) * num_chunks
    hops = tuple(
        BoundaryTime(0.0, hop if {a, b} == {case.slow, case.slow + 1} else 0.0)
        for a, b in pairwise(chain)
    )
    # The way back from the last stage to the first crosses the slow hop too.
    if num_chunks > 1:
        hops = tuple(
            BoundaryTime(0.0, hop) if (a, b) == (num_stages - 1, 0) else old
            for (a, b), old in zip(pairwise(chain), hops, strict=True)
        )
    times = tuple((ChunkTimes(*[t / 3 / num_chunks] * 3),) * num_chunks for t in case.times)
    return TimedPipeline(chain, num_micro_batches, times, hops, hops)


def schedules(case: Case, hop: float, m: int) -> Iterator[tuple[str, TimedPipeline, Schedule]]:
    """Yield every schedule of a case, in the order of `SCHEDULES`, with `m` micro-batches or a few
    fewer: interleaving takes a multiple of the stages."""
    num_stages = len(case.times)
    m -= m % num_stages
    plain = pipeline(case, hop, m)
    hops = [h.total_s for h in plain.forward_hops]
    rule = [min(count, m) for count in launch_counts(case.times, hops)]
    yield "1F1B", plain, one_f_one_b(num_stages, m)
    yield "HARP's steps", plain, one_f_one_b(num_stages, m, harp_counts(case.times, hops))
    yield "launch counts", plain, one_f_one_b(num_stages, m, rule)
    chunked = pipeline(case, hop, m, 2)
    yield "interleaved", chunked, interleaved(chunked.chain, m)
    yield "zero-bubble", plain, zero_bubble(plain, rule).schedule
    yield "synthesised", plain, synthesise(plain, rule).schedule
    doubled = [2 * count for count in rule]
    yield "synthesised, 2x memory", plain, synthesise(plain, doubled).schedule


def harp_counts(times: Sequence[float], hops: Sequence[float]) -> list[int]:
    """Return the counts of HARP's three steps: one more forward ahead, two over a hop of a tenth of
    a period, three over one of a half."""
    counts = [1]
    for hop in reversed(hops):
        ratio = hop / max(times)
        counts.append(counts[-1] + (1 if ratio < 0.1 else 2 if ratio < 0.5 else 3))
    return counts[::-1]


def simulated_s(asked: TimedPipeline, schedule: Schedule) -> float:
    """Return the makespan in periods."""
    return simulate(schedule, asked.times, asked.forward_hops, asked.backward_hops).makespan_s


def simulated(num_micro_batches: int) -> Iterator[Columns | list[str]]:
    """Yield the time of each schedule over 1F1B with the rule's launch counts; then means."""
    yield Columns.of(("pipeline", "hop", *SCHEDULES))
    ratios: dict[tuple[float, str], list[float]] = {}
    for case in CASES:
        for hop in HOPS:
            made = {
                name: simulated_s(asked, schedule)
                for name, asked, schedule in schedules(case, hop, num_micro_batches)
            }
            base_s = made["launch counts"]
            cells = []
            for name in SCHEDULES:
                ratio = made[name] / base_s
                ratios.setdefault((hop, name), []).append(ratio)
                shown = f"{base_s:.1f} periods" if name == "launch counts" else f"{ratio:.3f}"
                cells.append(shown)
            yield [case.name, f"{hop:g}", *cells]
    yield Columns.of(("hop, periods", *SCHEDULES))
    for hop in HOPS:
        yield [f"{hop:g}", *(f"{fmean(ratios[hop, name]):.3f}" for name in SCHEDULES)]


def really_run(
    hops: Sequence[float], num_micro_batches: int, period_s: float
) -> Iterator[Columns | list[str] | str]:
    """Yield runs beside the simulation."""
    # Ranks are forked, which CUDA does not survive.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_hetero.runtime.job.local.loading import preload
    from tools.sleeping_pipeline import measure

    preload()
    heads = "pipeline", "hop", "schedule", "simulated", "run", "run / simulated"
    yield Columns.of(heads)
    errors = []
    for case in CASES:
        for hop in hops:
            for name, asked, schedule in schedules(case, hop, num_micro_batches):
                expected_s = simulated_s(asked, schedule)
                with tempfile.TemporaryDirectory(prefix="megatron-hetero-") as folder:
                    found_s = measure(asked, schedule, period_s, Path(folder))
                errors.append(abs(found_s / expected_s - 1))
                cells = f"{expected_s:.2f}", f"{found_s:.2f}", f"{found_s / expected_s:.3f}"
                yield [case.name, f"{hop:g}", name, *cells]
    within = sum(error <= 0.05 for error in errors)
    yield (
        f"{len(errors)} runs, a period of {period_s * 1e3:g} ms: mean error {fmean(errors):.1%}, "
        f"worst {max(errors):.1%}; {within} within 5 %."
    )


OPTIONS = (
    option("--micro-batches", type=int, default=32, help="simulated (default: 32)"),
    option("--run", action="store_true", help="run a share of the cases too"),
    option("--run-hops", type=float, nargs="+", default=[1.0], help="(default: 1)"),
    option("--run-micro-batches", type=int, default=12, help="(default: 12)"),
    option("--period", type=float, default=0.3, help="of a run, s (default: 0.3)"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str] | str]:
    """Simulate every schedule and, if asked, run them."""
    yield from simulated(given.micro_batches)
    if given.run:
        yield from really_run(given.run_hops, given.run_micro_batches, given.period)
