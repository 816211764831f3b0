"""How long a plan takes, and how much memory, as the cluster grows.

    python tools/bench scale [--sizes N ...] [--runs 3] [--verbs] [--write FOLDER]
        [--json]

Clusters are made up (`tools/scale_clusters.py`) and planned by `plan`'s default strategies, each
run in a process of its own on one core.  Times are processor seconds, medians of the runs; reading
the files counts, the start of Python and its imports do not.  `growth` is the exponent between two
sizes: 1 is time in proportion to GPUs.  `--verbs` also runs `validate`, `flags`, `explain` and
`simulate` on the plan, as a user would: their times are whole processes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import save_plan
from megatron_hetero.planner import plan_and_explain
from tools.bench.alone import alone
from tools.bench.jobs import ROOT, step_s
from tools.bench.show import Columns, option
from tools.scale_clusters import write_case

SIZES = (64, 256, 1024, 10_240)
COLUMNS = Columns({
    "GPUs": "{num_gpus:,}", "CPU s": "{cpu_s:.1f}", "growth": "{growth:.2f}",
    "MiB": "{peak_memory_mib:.0f}", "step s": "{step_time_s:.3f}",
    "gap %": lambda row: "-" if row["gap"] is None else f"{100 * row['gap']:.1f}",
    "placements priced": "{num_priced:,}", "plan MiB": "{plan_mib:.2f}",
})  # fmt: skip
VERBS = ("validate", "flags", "explain", "simulate")


def run_once(cluster_path: Path, flags_path: Path, plan_path: Path) -> dict[str, Any]:
    """Read, plan and write once: times, memory, and what came out."""
    started = time.process_time()
    cluster = load_cluster(cluster_path)
    workload = load_workload(flags_path)
    read_s = time.process_time() - started
    plan, explanation = plan_and_explain(cluster, workload)
    search_s = time.process_time() - started - read_s
    save_plan(plan, plan_path)
    estimated_s = step_s(plan)
    return {
        "read_s": read_s,
        "search_s": search_s,
        "cpu_s": time.process_time() - started,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "step_time_s": estimated_s,
        "gap": plan.estimates and plan.estimates.gap,
        "num_priced": explanation.num_priced,
        "num_replicas": len(plan.replicas),
        "num_idle": len(plan.idle_devices),
        "strategy": plan.made_by.rpartition(" ")[2],
        "plan_mib": plan_path.stat().st_size / 2**20,
    }


def bench(num_gpus: int, runs: int, folder: Path, verbs: bool) -> dict[str, Any]:
    """Return the medians over the runs of one size.

    Raises:
        RuntimeError: two runs found different plans.
    """
    cluster, flags = write_case(num_gpus, folder)
    plan = folder / f"plan-{num_gpus}.json"
    found, contents = [], set()
    for _ in range(runs):
        found.append(alone(run_once, cluster, flags, plan, one_core=True))
        contents.add(plan.read_bytes())
    if len(contents) > 1:
        raise RuntimeError(f"{num_gpus} GPUs: equal inputs gave {len(contents)} plans")
    medians = {
        key: statistics.median(run[key] for run in found)
        for key in ("read_s", "search_s", "cpu_s", "peak_memory_mib")
    }
    result = {"num_gpus": num_gpus, **found[0], **medians, "runs": runs}
    if verbs:
        result["verbs_s"] = {verb: _verb_s(verb, cluster, plan) for verb in VERBS}
    return result


def _verb_s(verb: str, cluster: Path, plan: Path) -> float:
    command = [sys.executable, "-m", "megatron_hetero", verb, str(plan)]
    if verb != "flags":
        command += ["--cluster", str(cluster)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def growth(small: dict[str, Any], large: dict[str, Any]) -> float:
    """Return the exponent by which processor time grows with GPUs."""
    times = log(large["cpu_s"] / small["cpu_s"])
    return times / log(large["num_gpus"] / small["num_gpus"])


OPTIONS = (
    option("--sizes", nargs="+", type=int, default=SIZES, metavar="N"),
    option("--runs", type=int, default=3, metavar="N"),
    option("--verbs", action="store_true", help=f"time {', '.join(VERBS)} as well"),
    option("--write", type=Path, metavar="FOLDER", help="keep the files there"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Plan each size as often as is asked."""
    verbs = VERBS if given.verbs else ()
    yield Columns(COLUMNS | {f"{verb}, CPU s": f"{{verbs_s[{verb}]:.1f}}" for verb in verbs})
    before: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.write or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for num_gpus in given.sizes:
            row = bench(num_gpus, given.runs, folder, given.verbs)
            row["growth"] = growth(before, row) if before else None
            before = row
            yield row
