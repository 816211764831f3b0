"""How far plans may be from the best, under the project's own prices: step time, bound and gap.

    python tools/bench_gaps.py [--only TEXT ...] [--plans FOLDER] [--prove] [--json]

Plans the examples, the clusters of `bench_rehearse` and HexiScale's settings as `plan` does, and
prints what `plan` prints.  `search_s` and `bound_s` are processor seconds of the search and of the
bound within it.  Plans kept in the folder given with --plans are not searched again; their bounds
are.  With --prove bounds are proved as far as with `plan --prove`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from megatron_hetero.bounds.effort import PROOF, THOROUGH, ProofEffort  # noqa: E402
from megatron_hetero.bounds.step_time import step_time_bound  # noqa: E402
from megatron_hetero.cluster.file.description import load_cluster  # noqa: E402
from megatron_hetero.cost.model import CostModel  # noqa: E402
from megatron_hetero.cost.placing import placement_of  # noqa: E402
from megatron_hetero.model.load import load_workload  # noqa: E402
from megatron_hetero.plan.file import load_plan, save_plan  # noqa: E402
from megatron_hetero.plan.layout import format_layout  # noqa: E402
from megatron_hetero.planner import plan_cluster  # noqa: E402
from tools.bench_rehearse import CLUSTERS, MODELS  # noqa: E402
from tools.bench_settings import FOLDERS, files_of  # noqa: E402

_THREE_GPUS = ("--seq-length=2048", "--micro-batch-size=1", "--global-batch-size=32")
_64_GPUS = (
    "--num-layers=48", "--hidden-size=6144", "--ffn-hidden-size=16384",
    "--num-attention-heads=48", "--global-batch-size=256",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A cluster and a model, with flags beside its file."""

    name: str
    cluster: Path
    model: Path
    flags: tuple[str, ...] = ()


def jobs(only: Sequence[str] | None = None) -> list[Job]:
    """Return examples, settings, then rehearsed clusters; those whose name contains one of `only`,
    if that is given."""
    folders = [*FOLDERS, ROOT / "examples/budget"]
    folders += [ROOT / f"benchmarks/settings/setting-{name}" for name in ("1-7b", "1-13b", "3-30b")]
    found = [Job(folder.name, *files_of(folder)) for folder in folders]
    three = ROOT / "examples/three-gpus"
    found.append(Job(three.name, three / "cluster.yaml", three / "config.json", _THREE_GPUS))
    big = ROOT / "examples/h100-a100-l40s"
    model = ROOT / "examples/a100-rtx4090/gpt-7b.sh"
    found.append(Job(f"{big.name}, 22B", big / "cluster.yaml", model, _64_GPUS))
    for name, (cluster, size) in CLUSTERS.items():
        path, flags = MODELS[size]
        found.append(Job(f"{name}, {size}", ROOT / cluster, ROOT / path, flags))
    return [job for job in found if not only or any(text in job.name for text in only)]


def result_of(job: Job, folder: Path | None, effort: ProofEffort = THOROUGH) -> dict[str, Any]:
    """Make one row of the table."""
    cluster, workload = load_cluster(job.cluster), load_workload(job.model, job.flags)
    kept = folder and folder / f"{job.name.replace(' ', '-')}.json"
    started = time.process_time()
    if kept is not None and kept.exists():
        plan = load_plan(kept)
    else:
        plan = plan_cluster(cluster, workload)
        if kept is not None:
            save_plan(plan, kept)
    search_s = time.process_time() - started
    if plan.estimates is None:
        raise RuntimeError("the planner gives every plan estimates")
    step_s = plan.estimates.step_time_s
    started = time.process_time()
    bound = step_time_bound(
        CostModel(cluster, workload),
        1.01 * step_s,
        effort,
        uneven=placement_of(plan, cluster).has_shares,
    )
    bound_cpu_s = time.process_time() - started
    if bound.step_time_s > step_s * (1 + 1e-9):
        raise RuntimeError(f"{job.name}: a bound of {bound.step_time_s} s on a step of {step_s} s")
    return {
        "job": job.name,
        "gpus": len(cluster.devices),
        "step_time_s": step_s,
        "bound": bound.step_time_s,
        "gap": step_s / bound.step_time_s - 1,
        "search_s": search_s,
        "bound_s": bound_cpu_s,
        "layout": format_layout(plan.layout),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="jobs whose name contains one")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="plans, kept between runs")
    parser.add_argument("--prove", action="store_true", help="bounds as of `plan --prove`")
    parser.add_argument("--json", action="store_true", help="a list, for programs")
    options = parser.parse_args(arguments)
    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
    results = []
    if not options.json:
        print("| job | GPUs | step s | bound s | gap % | search s | bound, CPU s |")
        print("| --- | --: | --: | --: | --: | --: | --: |")
    for job in jobs(options.only):
        row = result_of(job, options.plans, PROOF if options.prove else THOROUGH)
        results.append(row)
        if not options.json:
            print(
                f"| {row['job']} | {row['gpus']} | {row['step_time_s']:.4f} | {row['bound']:.4f} "
                f"| {100 * row['gap']:.1f} | {row['search_s']:.1f} | {row['bound_s']:.1f} |",
                flush=True,
            )
    if options.json:
        print(json.dumps(results, indent=2))
    elif results:
        print(f"median gap {100 * statistics.median(row['gap'] for row in results):.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
