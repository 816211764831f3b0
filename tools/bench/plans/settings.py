"""What each setting that plans may choose brings: step times with and without it.

    python tools/bench settings [--clusters FOLDER ...] [--only TEXT ...] [--json]

A folder has cluster.yaml (or before.yaml) and a model.  Each is planned with all as the job's flags
say (`limits.as_given`), with one setting free at a time, and with all free.  For each plan: the
predicted step time, and the event simulator's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.limits import CHOICES
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.schedule.simulator.step import simulate_plan
from tools.bench.jobs import FOLDERS, files_of, plan_or_none, step_s
from tools.bench.show import Columns, is_chosen, only, option

SETTINGS = (
    "recompute", "micro_batch_size", "optimizer_share", "shares", "exchange", "context_parallel"
)  # fmt: skip
"""Those of `CHOICES` that the search sets."""
WAYS = {"none": (), **{name: (name,) for name in SETTINGS}, "all": SETTINGS}


def planned(cluster: Cluster, workload: Workload, free: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the predicted and simulated seconds of the plan that may choose `free`; None where
    none fits."""
    held = tuple(name for name in CHOICES if name not in free)
    cluster = replace(cluster, limits=replace(cluster.limits, as_given=held))
    plan = plan_or_none(cluster, workload)
    if plan is None:
        return None
    return {
        "predicted_s": step_s(plan),
        "simulated_s": simulate_plan(plan, cluster).step_time_s,
        "layout": format_layout(plan.layout),
    }


def compare(folder: Path) -> dict[str, Any]:
    """Plan one cluster with each setting alone (by its name), with none and with all."""
    cluster_path, model_path = files_of(folder)
    cluster, workload = load_cluster(cluster_path), load_workload(model_path)
    return {
        "folder": folder.name,
        "plans": {way: planned(cluster, workload, free) for way, free in WAYS.items()},
    }


def _cell(way: str) -> Callable[[Mapping[str, Any]], str]:
    """Return what writes the seconds predicted (simulated), and the saving."""

    def cell(row: Mapping[str, Any]) -> str:
        plan, before = row["plans"][way], row["plans"]["none"]
        if plan is None:
            return "none fits"
        text = f"{plan['predicted_s']:.3f} ({plan['simulated_s']:.3f})"
        if before is not None and plan is not before:
            text += f" {100 * (plan['predicted_s'] / before['predicted_s'] - 1):+.1f} %"
        return text

    return cell


COLUMNS = Columns(
    {"cluster": "{folder}"}
    | {"as given" if way == "none" else way: _cell(way) for way in WAYS}
)


OPTIONS = (
    option("--clusters", nargs="+", type=Path, metavar="FOLDER", default=FOLDERS),
    only("clusters"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Plan each cluster with each setting alone, with none and with all."""
    yield COLUMNS
    yield from (compare(f) for f in given.clusters if is_chosen(f.name, given.only))
