"""How far plans may be from the best, under the project's own prices: step time, bound and gap.

    python tools/bench gaps [--only TEXT ...] [--plans FOLDER] [--prove] [--json]

Plans the examples, the clusters of `rehearse` and HexiScale's settings as `plan` does, and
prints what `plan` prints.  `search_s` and `bound_s` are processor seconds of the search and of the
bound within it.  Plans kept in the folder given with --plans are not searched again; their bounds
are.  With --prove bounds are proved as far as with `plan --prove`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_hetero.bounds.effort import PROOF, THOROUGH, ProofEffort
from megatron_hetero.bounds.step_time import step_time_bound
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner import plan_cluster
from tools.bench.jobs import Job, jobs, step_s
from tools.bench.show import Columns, only, option


def result_of(job: Job, folder: Path | None, effort: ProofEffort = THOROUGH) -> dict[str, Any]:
    """Make one row of the table."""
    cluster, workload = job.load()
    kept = folder and folder / f"{job.name.replace(' ', '-')}.json"
    started = time.process_time()
    if kept is not None and kept.exists():
        plan = load_plan(kept)
    else:
        plan = plan_cluster(cluster, workload)
        if kept is not None:
            save_plan(plan, kept)
    search_s = time.process_time() - started
    seconds = step_s(plan)
    started = time.process_time()
    bound = step_time_bound(
        CostModel(cluster, workload),
        1.01 * seconds,
        effort,
        uneven=placement_of(plan, cluster).has_shares,
    )
    bound_cpu_s = time.process_time() - started
    if bound.step_time_s > seconds * (1 + 1e-9):
        raise RuntimeError(f"{job.name}: a bound of {bound.step_time_s} s on a step of {seconds} s")
    return {
        "job": job.name,
        "gpus": len(cluster.devices),
        "step_time_s": seconds,
        "bound": bound.step_time_s,
        "gap": seconds / bound.step_time_s - 1,
        "search_s": search_s,
        "bound_s": bound_cpu_s,
        "layout": format_layout(plan.layout),
    }


COLUMNS = Columns({
    "job": "{job}", "GPUs": "{gpus}", "step s": "{step_time_s:.4f}", "bound s": "{bound:.4f}",
    "gap %": lambda row: f"{100 * row['gap']:.1f}", "search s": "{search_s:.1f}",
    "bound, CPU s": "{bound_s:.1f}",
})  # fmt: skip


OPTIONS = (
    only(),
    option("--plans", type=Path, metavar="FOLDER", help="plans, kept between runs"),
    option("--prove", action="store_true", help="bounds as of `plan --prove`"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any] | str]:
    """Plan each job and bound its step."""
    if given.plans:
        given.plans.mkdir(parents=True, exist_ok=True)
    yield COLUMNS
    gaps = []
    for job in jobs(given.only):
        row = result_of(job, given.plans, PROOF if given.prove else THOROUGH)
        gaps.append(row["gap"])
        yield row
    if gaps:
        yield f"median gap {100 * statistics.median(gaps):.1f} %"
