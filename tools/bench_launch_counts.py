"""The planner's launch counts beside all counts there are, and between two sites.

    python tools/bench_launch_counts.py [--cases 40]

First table: random pipelines of three stages with one or two slow hops; the time with the counts of
the rule, and with those of the planner's search, over the best of all count vectors.  Second: four
stages on two sites whose hop takes 0.5 to 8 periods, under 1F1B, HARP's three steps (its limit on
hops lifted) and the planner.  All times by the pipeline recurrence that the planner uses, memory
unlimited.  Markdown on standard output.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.pipeline import least_pipeline_time_s, pipeline_time_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.planner.division.counts import WORTH, other_counts
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts

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


def harp(times: Sequence[float], hops: Sequence[float]) -> tuple[int, ...]:
    """Return the counts of HARP's three steps: 1, 2 or 3 more ahead over a hop of under 0.1, under
    0.5, more periods."""
    counts = [1]
    for hop in reversed(hops):
        ratio = hop / max(times)
        counts.append(counts[-1] + (1 if ratio < 0.1 else 2 if ratio < 0.5 else 3))
    return tuple(reversed(counts))


def geo_rows() -> Iterator[tuple[float, float, float, float, float]]:
    """Yield (hop, 1F1B, HARP, planner, the bound for all counts) of unlike sites, in periods."""
    times, m = (1.0, 1.0, 0.8, 0.8), GEO_MICRO_BATCHES
    for hop in GEO_HOPS:
        hops = (0.0, hop, 0.0)
        yield (
            hop,
            makespan(times, hops, m),
            makespan(times, hops, m, harp(times, hops)),
            makespan(times, hops, m, planned(times, hops, m)),
            least_pipeline_time_s(_stages(times), *_boundaries(hops), m),
        )


def _stages(times: Sequence[float]) -> list[PassTimes]:
    return [PassTimes(t / 3, 2 * t / 3) for t in times]


def _boundaries(hops: Sequence[float]) -> tuple[list[BoundaryTime], list[BoundaryTime]]:
    made = [BoundaryTime(0.0, hop) for hop in hops]
    return made, made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=40, help="random pipelines of each kind")
    options = parser.parse_args(arguments)
    print("| stages | micro-batches | rule, mean | rule, worst | planner, mean | planner, worst |")
    print("| --- | --- | --- | --- | --- | --- |")
    for equal in (True, False):
        for m in (12, 32):
            by_rule, by_planner = ratios(options.cases, equal, m)
            cells = [fmean(by_rule), max(by_rule), fmean(by_planner), max(by_planner)]
            kind = "equal" if equal else "unequal"
            print(f"| {kind} | {m} | " + " | ".join(f"{c:.3f}" for c in cells) + " |", flush=True)
    print("\n| hop, periods | 1F1B | HARP's steps | planner | no counts beat |")
    print("| --- | --- | --- | --- | --- |")
    for row in geo_rows():
        print(f"| {row[0]:g} | " + " | ".join(f"{value:.1f}" for value in row[1:]) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
