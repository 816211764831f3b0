"""What each setting that plans may choose brings: step times with and without it.

    python tools/bench_settings.py [--clusters FOLDER ...] [--json]

A folder has cluster.yaml (or before.yaml) and a model.  Each is planned with all as the job's flags
say (`limits.as_given`), with one setting free at a time, and with all free.  For each plan: the
predicted step time, and the event simulator's.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import CHOICES, Cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner.api import plan_and_explain
from megatron_hetero.schedule.simulator.step import simulate_plan

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(
    ROOT / name
    for name in (
        "examples/a100-rtx4090",
        "examples/lost-node",
        "examples/one-odd-gpu",
        "examples/rtx3080-rtx4090",
        "examples/two-sites",
        "benchmarks/settings/case-study-13b",
    )
)
SETTINGS = (
    "recompute", "micro_batch_size", "optimizer_share", "shares", "exchange", "context_parallel"
)  # fmt: skip
"""Those of `CHOICES` that the search sets."""


def files_of(folder: Path) -> tuple[Path, Path]:
    """Return the cluster and the model of a folder."""
    clusters = [folder / name for name in ("cluster.yaml", "before.yaml")]
    models = sorted([*folder.glob("*.flags"), *folder.glob("gpt*.sh")])
    return next(path for path in clusters if path.exists()), models[0]


def planned(cluster: Cluster, workload: Workload, free: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the predicted and simulated seconds of the plan that may choose `free`; None where
    none fits."""
    held = tuple(name for name in CHOICES if name not in free)
    cluster = replace(cluster, limits=replace(cluster.limits, as_given=held))
    try:
        plan, _ = plan_and_explain(cluster, workload)
    except InfeasiblePlanError:
        return None
    assert plan.estimates is not None
    return {
        "predicted_s": plan.estimates.step_time_s,
        "simulated_s": simulate_plan(plan, cluster).step_time_s,
        "layout": format_layout(plan.layout),
    }


def compare(folder: Path) -> dict[str, Any]:
    """Plan one cluster with each setting alone (by its name), with none and with all."""
    cluster, workload = (
        load(path)
        for load, path in zip((load_cluster, load_workload), files_of(folder), strict=True)
    )
    ways = {"none": (), **{name: (name,) for name in SETTINGS}, "all": SETTINGS}
    return {
        "folder": folder.name,
        "plans": {way: planned(cluster, workload, free) for way, free in ways.items()},
    }


def line(result: dict[str, Any]) -> str:
    """Write a row of the table for people: seconds predicted (simulated), and the saving."""
    plans, cells = result["plans"], []
    before = plans["none"]
    for plan in plans.values():
        if plan is None:
            cells.append("none fits")
            continue
        text = f"{plan['predicted_s']:.3f} ({plan['simulated_s']:.3f})"
        if before is not None and plan is not before:
            text += f" {100 * (plan['predicted_s'] / before['predicted_s'] - 1):+.1f} %"
        cells.append(text)
    return f"| {result['folder']} | " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--clusters", nargs="+", type=Path, metavar="FOLDER", default=FOLDERS)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="those whose name contains one")
    parser.add_argument("--json", action="store_true", help="a list, for programs")
    options = parser.parse_args(arguments)
    results = []
    if not options.json:
        print("| cluster | as given | " + " | ".join(SETTINGS) + " | all |")
    only = options.only or [""]
    for folder in (f for f in options.clusters if any(text in f.name for text in only)):
        results.append(compare(folder))
        if not options.json:
            print(line(results[-1]), flush=True)
    if options.json:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
