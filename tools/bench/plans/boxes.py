"""One machine with unlike cards: our plan beside what people do today.

    python tools/bench boxes [--only TEXT ...]

For every machine of `benchmarks/boxes` and every model of `benchmarks/boxes/models`, the step of
our plan; of (a), the best plan for the cards of one type alone; and of (b), even data
parallelism over all cards, each with the whole model and as many micro-batches, with recompute if
the smallest card needs it.  Precision is bf16 where all cards have it, fp16 otherwise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from tools.bench.jobs import ROOT, boxes, plan_or_none, quoted, step_s
from tools.bench.show import Columns, Failure, is_chosen, only

FOLDER = ROOT / "benchmarks" / "boxes"


def jobs(only: Sequence[str] = ()) -> Iterator[tuple[str, Path, Path, str]]:
    """Name, cluster file, model file and flag of the precision of each machine and model; those
    whose name contains one of `only`, if given."""
    for machine, path, flag in boxes(FOLDER):
        for model in sorted((FOLDER / "models").glob("*.flags")):
            if is_chosen(f"{machine}, {model.stem}", only):
                yield f"{machine}, {model.stem}", path, model, flag


def _row(name: str, cluster: Cluster, workload: Workload) -> dict[str, Any]:
    plan = plan_or_none(cluster, workload)
    alone = {
        kind: _step_s(cluster, kind, workload)
        for kind in sorted({node.gpu_type.name for node in cluster.nodes})
    }
    fitting = [seconds for seconds in alone.values() if seconds is not None]
    even = even_data_parallel_s(cluster, workload)
    today = min([*fitting, *([even] if even is not None else [])], default=None)
    ours = step_s(plan) if plan else None
    return {
        "job": name,
        "precision": workload.training.precision,
        "ours_s": ours,
        "alone_s": min(fitting, default=None),
        "even_s": even,
        "ratio": today / ours if ours and today else None,
        "layout": format_layout(plan.layout) if plan else None,
    }


def _step_s(cluster: Cluster, kind: str, workload: Workload) -> float | None:
    """Return the seconds of a step of the best plan for the cards of one type."""
    idle = tuple(d.name for n in cluster.nodes if n.gpu_type.name != kind for d in n.devices)
    limits = replace(cluster.limits, idle_devices=idle)
    plan = plan_or_none(replace(cluster, limits=limits), workload)
    return step_s(plan) if plan else None


def even_data_parallel_s(cluster: Cluster, workload: Workload) -> float | None:
    """Return the seconds of a step in which every card has the whole model and as many
    micro-batches.

    None where the smallest card cannot hold the model even with every layer recomputed.  A batch
    that the cards do not divide is rounded up, as samplers pad it, and priced for its true size.
    """
    cards, batch = len(cluster.devices), workload.training.global_batch_size
    padded = -(-batch // cards) * cards
    training = replace(workload.training, global_batch_size=padded)
    costs = CostModel(cluster, replace(workload, training=training))
    found = []
    for recompute in ("none", "full"):
        stages = [
            PlacedStage((device,), workload.model.num_layers, recompute=recompute)
            for device in cluster.devices
        ]
        placement = Placement(tuple(PlacedReplica((s,), padded // cards) for s in stages))
        cost = costs.placement(placement)
        if cost.missing_bytes <= 0:
            found.append(cost.step_time_s * batch / padded)
    return min(found, default=None)


def _seconds(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "does not fit" if row[key] is None else f"{row[key]:.3f} s"


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return "only ours fits" if row["ours_s"] else ""
    return f"{row['ratio']:.2f}"


COLUMNS = Columns({
    "machine, model": "{job}", "precision": "{precision}", "ours": _seconds("ours_s"),
    "one type alone": _seconds("alone_s"), "even on all": _seconds("even_s"),
    "times as fast": _ratio, "layout": lambda row: quoted(row["layout"]) if row["layout"] else "",
})  # fmt: skip


OPTIONS = (only("machines and models"),)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any] | str]:
    """Plan each machine and model; fail where a plan is slower than what people do today."""
    yield COLUMNS
    ratios = []
    for name, machine, model, flag in jobs(given.only or ()):
        row = _row(name, load_cluster(machine), load_workload(model, (flag,)))
        yield row
        if row["ratio"] is not None:
            ratios.append(row["ratio"])
    if ratios:
        words = f"geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
        yield Failure(words) if min(ratios) < 1 - 1e-9 else words
