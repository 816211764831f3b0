"""What plans leave of their cards, and what that costs: the examples with two kinds of reserve.

    python tools/bench memory [--clusters FOLDER ...]

A folder has cluster.yaml (or before.yaml) and models.  Each job is planned with 1 GiB in reserve on
every card, as plans were before CUDA's context, NCCL's buffers and a margin were counted, and with
what `cost/memory/libraries.py` counts.  "in use" and "left" are of the fullest card.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_and_explain
from tools.bench.jobs import ROOT, cluster_of, quoted
from tools.bench.show import Columns, option

GIB = 1 << 30
FLAGS = {"config.json": "--seq-length 2048 --micro-batch-size 1 --global-batch-size 64 --bf16"}
"""Flags of the jobs whose file has only the model."""
COLUMNS = Columns.of((
    "example", "step, 1 GiB in reserve", "step", "ratio", "plan", "libraries", "in use", "left"
))  # fmt: skip


def jobs(folders: list[Path]) -> list[tuple[str, Cluster, Workload]]:
    """Return the name, the cluster and the job of every model in the folders."""
    found = []
    for folder in folders:
        cluster = load_cluster(cluster_of(folder))
        models = [*folder.glob("*.flags"), *folder.glob("*.sh"), *folder.glob("config.json")]
        for model in sorted(models):
            workload = load_workload(model, FLAGS.get(model.name, "").split())
            found.append((f"{folder.name}, {model.stem}", cluster, workload))
    return found


def planned(cluster: Cluster, workload: Workload, reserve_bytes: int | None) -> Plan | None:
    """Return the plan with this reserve; None where none fits."""
    limits = replace(cluster.limits, memory_reserve_bytes=reserve_bytes)
    try:
        return plan_and_explain(replace(cluster, limits=limits), workload)[0]
    except InfeasiblePlanError:
        return None


def row(name: str, cluster: Cluster, workload: Workload) -> list[str]:
    """Plan one job in both ways."""
    before, now = (planned(cluster, workload, reserve) for reserve in (GIB, None))
    old_s = None if before is None or before.estimates is None else before.estimates.step_time_s
    old = "none fits" if old_s is None else f"{old_s:.3f} s"
    if now is None or now.estimates is None:
        return [name, old, "none fits", "", "", "", "", ""]
    estimates = now.estimates
    fullest = max(estimates.devices.values(), key=lambda device: device.used_part)
    same = before is not None and format_layout(before.layout) == format_layout(now.layout)
    step_s = estimates.step_time_s
    return [
        name,
        old,
        f"{step_s:.3f} s",
        "" if old_s is None else f"{step_s / old_s:.4f}",
        "the same layout" if same else quoted(format_layout(now.layout)),
        f"{fullest.parts_bytes['libraries'] / GIB:.2f} GiB",
        f"{fullest.used_part:.1%}",
        f"{(fullest.capacity_bytes - fullest.used_bytes) / GIB:.2f} GiB",
    ]


EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").iterdir()
    # Examples with a workload serve, they do not train.
    if path.is_dir() and not (path / "workload.yaml").exists()
)
OPTIONS = (option("--clusters", nargs="+", type=Path, default=EXAMPLES, metavar="FOLDER"),)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Plan each job with both reserves."""
    yield COLUMNS
    for job in jobs(given.clusters):
        yield row(*job)
