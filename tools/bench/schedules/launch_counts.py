"""The planner's launch counts beside all counts there are, and between two sites.

    python tools/bench launch-counts [--cases 40]

First table: random pipelines of three stages with one or two slow hops; the time with the counts of
the rule, and with those of the planner's search, over the best of all count vectors.  Second: four
stages on two sites whose hop takes 0.5 to 8 periods, under 1F1B, HARP's three steps (its limit on
hops lifted) and the planner.  All times by the pipeline recurrence that the planner uses, memory
unlimited.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from statistics import fmean

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.pipeline import least_pipeline_time_s, pipeline_time_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.planner.division.counts import WORTH, other_counts
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts
from tools.bench.schedules.schedules import harp_counts
from tools.bench.show import Columns, option

GEO_HOPS = (0.5, 1.0, 2.0, 4.0, 8.0)
GEO_MICRO_BATCHES = 64


def makespan(
    times: Sequence[float], hops: Sequence[float], m: int, counts: Sequence[int] | None = None
) -> float:
    """Return the makespan where a third of a stage's time is forward and hops are latency."""
    return pipeline_time_s(_stages(times), *_boundaries(hops), m, counts)


def rule(times: Sequence[float], hops: Sequence[float], m: int) -> tuple[int, ...]:
    """Return the rule's counts, cut to the micro-batches."""
    return tuple(min(count, m) for count in launch_counts(times, hops))


def planned(times: Sequence[float], hops: Sequence[float], m: int) -> tuple[int, ...]:
    """Return the counts that a climb by the planner's changes of counts comes to, which starts from
    the rule's."""
    counts = rule(times, hops, m)
    time_s, improved = makespan(times, hops, m, counts), True
    trips_s = [2 * hop for hop in hops]
    while improved:
        improved = False
        for moved in other_counts(counts, m, times, trips_s):
            moved_s = makespan(times, hops, m, moved)
            if moved_s < WORTH * time_s:
                counts, time_s, improved = moved, moved_s, True
                break
    return counts


def best_of_three(times: Sequence[float], hops: Sequence[float], m: int) -> float:
    """Return the least time over every falling vector of three counts."""
    return min(
        makespan(times, hops, m, (a, b, c))
        for a in range(1, m + 1)
        for b in range(1, a + 1)
        for c in range(1, min(b, 2) + 1)
    )


def random_cases(num_cases: int, equal: bool) -> Iterator[tuple[list[float], list[float]]]:
    """Yield stage times and hops in periods, the same every time."""
    chance = random.Random(7)
    for _ in range(num_cases):
        times = [1.0] * 3 if equal else [chance.uniform(0.3, 1.0) for _ in range(3)]
        hops = [chance.uniform(0, 2), chance.choice([0.0, chance.uniform(0, 2)])]
        chance.shuffle(hops)
        yield times, hops


def ratios(num_cases: int, equal: bool, m: int) -> tuple[list[float], list[float]]:
    """Divide the times of the rule, and of the planner, by the best of all counts."""
    by_rule, by_planner = [], []
    for times, hops in random_cases(num_cases, equal):
        best = best_of_three(times, hops, m)
        by_rule.append(makespan(times, hops, m, rule(times, hops, m)) / best)
        by_planner.append(makespan(times, hops, m, planned(times, hops, m)) / best)
    return by_rule, by_planner


def geo_rows() -> Iterator[tuple[float, float, float, float, float]]:
    """Yield (hop, 1F1B, HARP, planner, the bound for all counts) of unlike sites, in periods."""
    times, m = (1.0, 1.0, 0.8, 0.8), GEO_MICRO_BATCHES
    for hop in GEO_HOPS:
        hops = (0.0, hop, 0.0)
        yield (
            hop,
            makespan(times, hops, m),
            makespan(times, hops, m, harp_counts(times, hops)),
            makespan(times, hops, m, planned(times, hops, m)),
            least_pipeline_time_s(_stages(times), *_boundaries(hops), m),
        )


def _stages(times: Sequence[float]) -> list[PassTimes]:
    return [PassTimes(t / 3, 2 * t / 3) for t in times]


def _boundaries(hops: Sequence[float]) -> tuple[list[BoundaryTime], list[BoundaryTime]]:
    made = [BoundaryTime(0.0, hop) for hop in hops]
    return made, made


COUNTS = (
    "stages", "micro-batches", "rule, mean", "rule, worst", "planner, mean", "planner, worst",
)  # fmt: skip
SITES = "hop, periods", "1F1B", "HARP's steps", "planner", "no counts beat"


OPTIONS = (option("--cases", type=int, default=40, help="random pipelines of each kind"),)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Time random pipelines, then those of two sites."""
    yield Columns.of(COUNTS)
    for equal in (True, False):
        for m in (12, 32):
            by_rule, by_planner = ratios(given.cases, equal, m)
            values = [fmean(by_rule), max(by_rule), fmean(by_planner), max(by_planner)]
            kind = "equal" if equal else "unequal"
            yield [kind, str(m), *(f"{value:.3f}" for value in values)]
    yield Columns.of(SITES)
    for hop, *values in geo_rows():
        yield [f"{hop:g}", *(f"{value:.1f}" for value in values)]
