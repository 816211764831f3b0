"""How much a plan hangs on the flags that it may change: steps from unlike flags, and their ratio.

    python tools/bench flags [--only TEXT ...] [--json]

Plans the jobs of `gaps` as `plan` does, each with three pairs of micro-batch size and
recompute in its flags.  All of them may lead to the same plan, as the planner chooses both anew;
`worst / best` is what it may cost to have begun with the wrong pair.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_hetero.cost.placement import Recompute
from megatron_hetero.planner import plan_cluster
from tools.bench.jobs import Job, jobs, step_s
from tools.bench.show import Columns, only

SETTINGS: tuple[tuple[int, Recompute], ...] = ((1, "none"), (4, "none"), (2, "full"))


def result_of(job: Job) -> dict[str, Any]:
    """Make one row of the table."""
    cluster, workload = job.load()
    steps_s = {}
    for size, recompute in SETTINGS:
        training = replace(workload.training, micro_batch_size=size, recompute=recompute)
        plan = plan_cluster(cluster, replace(workload, training=training))
        steps_s[f"{size}, {recompute}"] = step_s(plan)
    return {
        "job": job.name,
        "gpus": len(cluster.devices),
        "step_times_s": steps_s,
        "ratio": max(steps_s.values()) / min(steps_s.values()),
    }


NAMES = [f"{size}, {recompute}" for size, recompute in SETTINGS]
COLUMNS = Columns(
    {"job": "{job}", "GPUs": "{gpus}"}
    | {name: f"{{step_times_s[{name}]:.4f}}" for name in NAMES}
    | {"worst / best": "{ratio:.4f}"}
)


OPTIONS = (only(),)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Plan each job from all pairs of flags."""
    yield COLUMNS
    yield from map(result_of, jobs(given.only))
