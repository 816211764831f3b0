"""How much a plan hangs on the flags that it may change: steps from unlike flags, and their ratio.

    python tools/bench_flags.py [--only TEXT ...] [--json]

Plans the jobs of `bench_gaps` as `plan` does, each with three pairs of micro-batch size and
recompute in its flags.  All of them may lead to the same plan, as the planner chooses both anew;
`worst / best` is what it may cost to have begun with the wrong pair.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner import plan_cluster
from tools.bench_gaps import Job, jobs

SETTINGS: tuple[tuple[int, Recompute], ...] = ((1, "none"), (4, "none"), (2, "full"))


def result_of(job: Job) -> dict[str, Any]:
    """Make one row of the table."""
    cluster, workload = load_cluster(job.cluster), load_workload(job.model, job.flags)
    steps_s = {}
    for size, recompute in SETTINGS:
        training = replace(workload.training, micro_batch_size=size, recompute=recompute)
        plan = plan_cluster(cluster, replace(workload, training=training))
        if plan.estimates is None:
            raise RuntimeError("the planner gives every plan estimates")
        steps_s[f"{size}, {recompute}"] = plan.estimates.step_time_s
    return {
        "job": job.name,
        "gpus": len(cluster.devices),
        "step_times_s": steps_s,
        "ratio": max(steps_s.values()) / min(steps_s.values()),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="jobs whose name contains one")
    parser.add_argument("--json", action="store_true", help="a list, for programs")
    options = parser.parse_args(arguments)
    results = []
    if not options.json:
        names = " | ".join(f"{size}, {recompute}" for size, recompute in SETTINGS)
        print(f"| job | GPUs | {names} | worst / best |")
        print("| --- | --: |" + " --: |" * (len(SETTINGS) + 1))
    for job in jobs(options.only):
        row = result_of(job)
        results.append(row)
        if not options.json:
            steps = " | ".join(f"{step_s:.4f}" for step_s in row["step_times_s"].values())
            print(f"| {row['job']} | {row['gpus']} | {steps} | {row['ratio']:.4f} |", flush=True)
    if options.json:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
