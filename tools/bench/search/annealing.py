"""Plans for clusters drawn from a hash, beside simulated annealing over whole plans.

    python tools/bench annealing [--commit HASH] [--only TEXT ...] [--plans N] [--seconds S]
        [--kept FOLDER] [--json]

24 clusters of 2 to 24 GPUs (`drawn_clusters`) follow from the hash, by default of the last commit
that changed the planner.  Each is planned as `plan` does, and annealed twice
(`referees.annealing`): from a random plan, and from ours.  An annealing ends after a million plans
or ten minutes of processor time, unless told otherwise.  All plans are simulated alike; a ratio is
our step over the annealing's, so that above 1.003 we are behind.  With --kept a run that was
stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_hetero.collector import no_collector
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.problem import Problem, make_problem
from tools.bench.jobs import step_s
from tools.bench.show import Columns, is_chosen, only, option
from tools.drawn_clusters import DrawnJob, drawn_job, planner_commit, random_of
from tools.referees.annealing.run import Annealing

NUM_CLUSTERS = 24
BEHIND = 1.003
"""Ratios up to this are no other plan, but the same to rounding of layers and micro-batches."""
_MAX_PLANS, _MAX_SECONDS = 1_000_000, 600.0
_STARTS = ("scratch", "ours")


def fitting_jobs(commit: str) -> Iterator[DrawnJob]:
    """Yield the jobs of a hash: of each number the first drawn for which a random plan fits."""
    for number in range(NUM_CLUSTERS):
        random = random_of(commit, "small", number)
        job = drawn_job(random)
        while Annealing(problem_of(job), 0).first() is None:
            job = drawn_job(random)
        yield job


def problem_of(job: DrawnJob) -> Problem:
    """Return a job as the planner is asked it."""
    return make_problem(*job.load())


def result_of(
    job: DrawnJob, limits: dict[str, float], row: dict[str, Any], path: Path | None
) -> None:
    """Fill in one row, as far as it is not: our plan, and both annealings.

    Args:
        limits: of an annealing, in plans and seconds.
        row: what is known already.
        path: where it is kept after each of the three.
    """
    cluster, workload = job.load()
    if row.get("limits") != limits or row.get("flags") != list(job.flags):
        row.clear()
        row |= {"limits": limits, "flags": list(job.flags), "cluster": job.cluster_data}
    starts: dict[str, Placement | None] = {"scratch": None}
    if "ours" not in row:
        started = time.process_time()
        try:
            plan = plan_cluster(cluster, workload, bounded=False)
        except InfeasiblePlanError as error:
            row |= {"our_step_s": None, "plan": str(error), "ours": None}
        else:
            starts["ours"] = ours = placement_of(plan, cluster)
            row |= {"our_step_s": step_s(plan), "plan": described(ours)}
        row["our_search_s"] = time.process_time() - started
        _save(row, path)
    for start, placement in starts.items():
        if start in row:
            continue
        with no_collector():
            annealing = Annealing(
                problem_of(job), 1, max_plans=limits["plans"], max_seconds=limits["seconds"]
            )
            found = annealing.run(placement)
        if found is None:
            raise RuntimeError(f"{job.machines}: no random plan fits")
        row[start] = {
            "step_s": found.step_time_s,
            "ratio": row["our_step_s"] and row["our_step_s"] / found.step_time_s,
            "plan": described(found.placement),
            "plans_drawn": found.num_plans,
            "seconds": found.seconds,
        }
        _save(row, path)


def described(placement: Placement) -> str:
    """Write a plan in one line: of each stage node, width and layers, those recomputed behind a
    slash; of each replica micro-batches, their size and launch counts."""
    replicas = []
    for replica in placement.replicas:
        stages = []
        for stage in replica.stages:
            nodes = "+".join(dict.fromkeys(device.node for device in stage.devices))
            text = f"{nodes}*{len(stage.devices)}:{stage.num_layers}"
            if stage.recompute is not None:
                text += f"/{stage.recompute}"
                some = stage.recompute_num_layers
                text += "" if some is None else f" {some}"
            if stage.shares or stage.context_parallel > 1:
                text += f" shares {stage.shares} cp{stage.context_parallel}"
            stages.append(text)
        counts = "" if replica.launch_counts is None else f" ahead {replica.launch_counts}"
        size = "" if replica.micro_batch_size is None else f"x{replica.micro_batch_size}"
        replicas.append(f"{', '.join(stages)} @{replica.num_micro_batches}{size}{counts}")
    groups = " by groups" if placement.exchange_groups else ""
    return " | ".join(replicas) + groups


def _save(row: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(row, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return clusters, how many we have no plan for, where we are behind else, the largest ratios
    of both starts, and the limits."""
    planned = [row for row in rows if row["our_step_s"] is not None]
    ratios = [[row[start]["ratio"] for start in _STARTS] for row in planned]
    worst = [f"{max(of_start):.4f}" for of_start in zip(*ratios, strict=True)] or ["-", "-"]
    limits = rows[0]["limits"]
    return [
        str(len(rows)), str(len(rows) - len(planned)),
        str(sum(max(of_row) > BEHIND for of_row in ratios)), *worst,
        f"{limits['plans']:,}", f"{limits['seconds']:g}",
    ]  # fmt: skip


def _of(start: str, key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    """Return what writes a value of an annealing; "none" where we say that no plan fits."""

    def cell(row: Mapping[str, Any]) -> str:
        if row[start] is None:
            return "-"
        return "none" if row[start][key] is None else format(row[start][key], form)

    return cell


def _sum(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format(sum(row[start][key] for start in _STARTS if row[start]), form)


COLUMNS = Columns({
    "cluster": "{name}", "model": "{model}",
    "our step s": lambda row: "none" if row["our_step_s"] is None else f"{row['our_step_s']:.4f}",
    "annealed s": _of("scratch", "step_s", ".4f"), "ratio": _of("scratch", "ratio", ".4f"),
    "from our plan s": _of("ours", "step_s", ".4f"),
    "ratio from our plan": _of("ours", "ratio", ".4f"),
    "plans drawn": _sum("plans_drawn", ","), "CPU s": _sum("seconds", ".0f"),
})  # fmt: skip
TOTALS = (
    "clusters", "no plan", "behind", "worst", "worst from our plan", "most plans", "most CPU s",
)  # fmt: skip


OPTIONS = (
    option("--commit", metavar="HASH", help="default: the planner's last"),
    only("clusters"),
    option("--plans", type=int, default=_MAX_PLANS, metavar="N", help="an annealing's"),
    option("--seconds", type=float, default=_MAX_SECONDS, metavar="S", help="of the processor"),
    option("--kept", type=Path, metavar="FOLDER", help="results, kept between runs"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any] | list[str] | str]:
    """Plan and anneal the jobs of the hash."""
    commit = given.commit or planner_commit()
    if given.kept:
        given.kept.mkdir(parents=True, exist_ok=True)
    yield f"Drawn from {commit}:\n"
    yield COLUMNS
    rows: list[dict[str, Any]] = []
    for number, job in enumerate(fitting_jobs(commit)):
        name = f"{job.place} {number}: {job.machines}"
        if not is_chosen(name, given.only):
            continue
        path = given.kept and given.kept / f"{commit[:12]}-{number}.json"
        row = json.loads(path.read_text()) if path is not None and path.exists() else {}
        result_of(job, {"plans": given.plans, "seconds": given.seconds}, row, path)
        rows.append({"name": name, "model": job.model, **row})
        yield rows[-1]
    if rows:
        yield Columns.of(TOTALS)
        yield summary(rows)
