"""One machine with unlike cards: our plan beside what people do today.

    python tools/bench_boxes.py [--only TEXT ...] [--out FILE]

For every machine of `benchmarks/boxes` and every model of `benchmarks/boxes/models`, the step of
our plan; of (a), the best plan for the cards of one type alone; and of (b), even data
parallelism over all cards, each with the whole model and as many micro-batches, with recompute if
the smallest card needs it.  Precision is bf16 where all cards have it, fp16 otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from megatron_hetero.cluster.file.description import load_cluster  # noqa: E402
from megatron_hetero.cluster.spec import Cluster  # noqa: E402
from megatron_hetero.cost.model import CostModel  # noqa: E402
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement  # noqa: E402
from megatron_hetero.errors import InfeasiblePlanError  # noqa: E402
from megatron_hetero.model.load import load_workload  # noqa: E402
from megatron_hetero.model.spec import Workload  # noqa: E402
from megatron_hetero.plan.layout import format_layout  # noqa: E402
from megatron_hetero.planner import plan_cluster  # noqa: E402

FOLDER = ROOT / "benchmarks" / "boxes"


def jobs(only: Sequence[str] = ()) -> Iterator[tuple[str, Path, Path, str]]:
    """Name, cluster file, model file and flag of the precision of each machine and model; those
    whose name contains one of `only`, if given."""
    for machine in sorted(FOLDER.glob("*.yaml")):
        nodes = load_cluster(machine).nodes
        flag = "--bf16" if all(node.gpu_type.peak_flops["bf16"] for node in nodes) else "--fp16"
        for model in sorted((FOLDER / "models").glob("*.flags")):
            name = f"{machine.stem}, {model.stem}"
            if not only or any(text in name for text in only):
                yield name, machine, model, flag


def rows(only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield one row for each of `jobs`."""
    for name, machine, model, flag in jobs(only):
        yield _row(name, load_cluster(machine), load_workload(model, (flag,)))


def _row(name: str, cluster: Cluster, workload: Workload) -> dict[str, Any]:
    plan = _planned(cluster, workload)
    alone = {
        kind: _step_s(cluster, kind, workload)
        for kind in sorted({node.gpu_type.name for node in cluster.nodes})
    }
    fitting = [step_s for step_s in alone.values() if step_s is not None]
    even = even_data_parallel_s(cluster, workload)
    today = min([*fitting, *([even] if even is not None else [])], default=None)
    ours = plan and plan.estimates and plan.estimates.step_time_s
    return {
        "job": name,
        "precision": workload.training.precision,
        "ours_s": ours,
        "alone_s": min(fitting, default=None),
        "even_s": even,
        "ratio": today / ours if ours and today else None,
        "layout": format_layout(plan.layout) if plan else None,
    }


def _planned(cluster: Cluster, workload: Workload) -> Any:
    try:
        return plan_cluster(cluster, workload)
    except InfeasiblePlanError:
        return None


def _step_s(cluster: Cluster, kind: str, workload: Workload) -> float | None:
    """Return the seconds of a step of the best plan for the cards of one type."""
    idle = tuple(d.name for n in cluster.nodes if n.gpu_type.name != kind for d in n.devices)
    limits = replace(cluster.limits, idle_devices=idle)
    plan = _planned(replace(cluster, limits=limits), workload)
    return plan.estimates.step_time_s if plan else None


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


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Write the results as a table of a page."""
    heads = "machine, model", "precision", "ours", "one type alone", "even on all", "times as fast"
    yield f"| {' | '.join(heads)} | layout |"
    yield "| --- | --- | --: | --: | --: | --: | --- |"
    for row in results:
        steps = (row["ours_s"], row["alone_s"], row["even_s"])
        shown = " | ".join("does not fit" if s is None else f"{s:.3f} s" for s in steps)
        ratio = "only ours fits" if row["ours_s"] and row["ratio"] is None else (
            "" if row["ratio"] is None else f"{row['ratio']:.2f}")  # fmt: skip
        layout = f"`{row['layout']}`".replace("|", "\\|") if row["layout"] else ""
        yield f"| {row['job']} | {row['precision']} | {shown} | {ratio} | {layout} |"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; exit 1 where a plan of ours is slower than what people do today."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=())
    parser.add_argument("--out", type=Path, metavar="FILE", help="results as JSON")
    options = parser.parse_args(arguments)
    results = []
    for row in rows(options.only):
        results.append(row)
        print(row, file=sys.stderr, flush=True)
    print("\n".join(table(results)))
    ratios = [row["ratio"] for row in results if row["ratio"] is not None]
    if ratios:
        print(f"\ngeometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(ratio < 1 - 1e-9 for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
