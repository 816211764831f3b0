"""Plans and processor time of this tree's search beside another's, job by job.

    python tools/bench search --tree FOLDER [--only TEXT ...] [--large N] [--scale SIZE ...]
        [--drawn FIRST END] [--commit HASH] [--seq-length N] [--without STRATEGY ...]
        [--plans FOLDER] [--json]

The first FOLDER is another checkout of this repository, for example ``git worktree add FOLDER
COMMIT``.  The jobs are those of `jobs`, the first N of seed 1 of the benchmark `large`, those
of `scale` of the sizes given, and those drawn from a hash.  Both trees search in processes of their
own, one after the other, without the lower bound; both plans are then simulated by this tree.  Of
every GPU both keep 1 GiB free, the default of the first releases.  A plan of the other tree that
this one refuses, or whose memory it finds too large, is listed and not counted.  With --without
this tree's search leaves strategies out (the names are those of classes).  Plans kept in the folder
given with --plans are not searched again: a folder is for two states of the code, which its files
do not name.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import HeteroError, InfeasiblePlanError
from megatron_hetero.files import canonical_json, read_yaml
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.schedule.estimate import plan_cost
from megatron_hetero.units import format_bytes
from tools.bench.jobs import ROOT, Job, jobs
from tools.bench.search.large import large_jobs
from tools.bench.show import Columns, is_chosen, only, option
from tools.drawn_clusters import drawn_job, planner_commit, random_of
from tools.scale_clusters import write_case

_CHILD = """
import sys, time
from pathlib import Path
tree, cluster_path, model_path, plan_path, without, *flags = sys.argv[1:]
sys.path.insert(0, tree)
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import save_plan
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.evaluate.written import bare_plan
try:
    from megatron_hetero.planner.evaluate.rescore import Rescorer
    from megatron_hetero.planner.portfolio import default_strategies, no_collector, search
except ModuleNotFoundError:  # trees of before the rooms
    from megatron_hetero.planner.rescore import Rescorer
    from megatron_hetero.planner.run import default_strategies, no_collector, search
out = without.split()
strategies = [s for s in default_strategies() if type(s).__name__ not in out] if out else None
cluster, workload = load_cluster(Path(cluster_path)), load_workload(Path(model_path), flags)
started = time.process_time()
with no_collector():
    problem = make_problem(cluster, workload)
    best = Rescorer(search(problem, strategies=strategies)).best()
print(time.process_time() - started)
save_plan(bare_plan(problem, best, {}), Path(plan_path))
"""


JOB_OPTIONS = (
    only(),
    option("--large", type=int, default=0, metavar="N", help="jobs of `large`"),
    option("--scale", type=int, nargs="+", default=[], metavar="SIZE", help="GPUs"),
    option(
        "--drawn", type=int, nargs=2, default=(0, 0), metavar=("FIRST", "END"),
        help="jobs of up to 24 GPUs drawn from a hash, by number",
    ),
    option("--commit", metavar="HASH", help="to draw from; the planner's last commit by itself"),
    option("--seq-length", type=int, metavar="N", help="of drawn jobs, in batches of 16 sequences"),
)  # fmt: skip
"""Which jobs `all_jobs` returns."""


def all_jobs(given: argparse.Namespace, folder: Path) -> list[Job]:
    """Return the jobs of `JOB_OPTIONS`; those made up are written to a folder."""

    def written(name: str, stem: str, cluster_data: Any, flags: Sequence[str]) -> Job:
        cluster, model = folder / f"{stem}.yaml", folder / f"{stem}.flags"
        cluster.write_text(canonical_json(cluster_data))
        model.write_text(" ".join(flags))
        return Job(name, cluster, model)

    found = jobs()
    for number, large in enumerate(islice(large_jobs(1), given.large)):
        name = f"large {number}: {large.num_gpus} GPUs, {large.model}"
        found.append(written(name, f"large-{number}", large.cluster_data(), large.flags()))
    found += [Job(f"scale: {size:,} GPUs", *write_case(size, folder)) for size in given.scale]
    numbers = range(*given.drawn)
    commit = given.commit or (planner_commit() if numbers else "")
    more: tuple[str, ...] = ()
    if given.seq_length:
        # Megatron takes the last of equal flags.
        length = str(given.seq_length)
        more = ("--seq-length", length, "--max-position-embeddings", length)
        more += ("--micro-batch-size", "1", "--global-batch-size", "16")
    for number in numbers:
        job = drawn_job(random_of(commit, "search", number))
        name = f"drawn {number}: {job.machines}, {job.model}"
        found.append(written(name, f"drawn-{number}", job.cluster_data, job.flags + more))
    found = [job for job in found if is_chosen(job.name, given.only)]
    return [with_equal_memory(job, folder / f"equal-{n}.yaml") for n, job in enumerate(found)]


def with_equal_memory(job: Job, path: Path) -> Job:
    """Write the job's cluster with `limits.memory_reserve` of 1 GiB; return the job with it."""
    cluster = read_yaml(job.cluster).data
    cluster.setdefault("limits", {})["memory_reserve"] = "1GiB"
    path.write_text(canonical_json(cluster))
    return replace(job, cluster=path)


def planned(tree: Path, job: Job, plan: Path, without: Sequence[str] = ()) -> float:
    """Write the plan that a tree finds, if it is not there yet; processor seconds of its search."""
    seconds = plan.with_suffix(".seconds")
    if seconds.exists():
        return float(seconds.read_text())
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    paths = [str(path) for path in (tree, job.cluster, job.model, plan)]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *paths, " ".join(without), *job.flags],
        check=True,
        env=environment,
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds.write_text(done.stdout.split()[-1])
    return float(seconds.read_text())


def step_of(job: Job, path: Path) -> tuple[float, str]:
    """Return the seconds of a plan's step as this tree simulates it, and its layout.

    Raises:
        HeteroError: this tree refuses the plan, or finds that a GPU's memory does not hold it.
    """
    (cluster, workload), plan = job.load(), load_plan(path)
    validate_plan(plan, cluster)
    costs = CostModel(cluster, workload)
    cost = plan_cost(plan, costs, placement_of(plan, cluster))
    if cost.missing_bytes > 0:
        raise InfeasiblePlanError(f"a GPU lacks {format_bytes(cost.missing_bytes)}")
    return cost.step_time_s, format_layout(plan.layout)


def compare(job: Job, other: Path, folder: Path, without: Sequence[str]) -> dict[str, Any]:
    """Return one row: both steps and times."""
    row: dict[str, Any] = {"job": job.name}
    for name, tree in (("other", other), ("ours", ROOT)):
        kept = folder / name
        kept.mkdir(exist_ok=True)
        plan = kept / f"{''.join(c if c.isalnum() else '-' for c in job.name)}.json"
        row[f"{name}_search_s"] = planned(tree, job, plan, without if name == "ours" else ())
        try:
            row[f"{name}_step_s"], row[f"{name}_layout"] = step_of(job, plan)
        except HeteroError as error:
            row[f"{name}_refused"] = str(error)
    return row


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the geometric means of ours over the other's, and the worst step."""
    counted = [row for row in rows if "ours_step_s" in row and "other_step_s" in row]
    steps = [row["ours_step_s"] / row["other_step_s"] for row in counted]
    times = [row["ours_search_s"] / row["other_search_s"] for row in counted]
    return {
        "num_jobs": len(counted),
        "step_ratio": statistics.geometric_mean(steps),
        "worst_step_ratio": max(steps),
        "search_ratio": statistics.geometric_mean(times),
    }


def _value(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format(row[key], form) if key in row else "refused"


def _ratio(what: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    """Return what writes ours over the other's, or why a plan does not count."""

    def cell(row: Mapping[str, Any]) -> str:
        for name in ("ours", "other"):
            if f"{name}_refused" in row:
                return f"{name}: {row[f'{name}_refused']}" if what == "step_s" else "-"
        return format(row[f"ours_{what}"] / row[f"other_{what}"], form)

    return cell


COLUMNS = Columns({
    "job": "{job}",
    "step s": _value("ours_step_s", ".4f"), "step before": _value("other_step_s", ".4f"),
    "step ratio": _ratio("step_s", ".4f"),
    "search s": "{ours_search_s:.1f}", "search before": "{other_search_s:.1f}",
    "search ratio": _ratio("search_s", ".2f"),
})  # fmt: skip
MEANS = Columns({
    "jobs": "{num_jobs}", "step, geometric mean": "{step_ratio:.4f}",
    "worst step": "{worst_step_ratio:.4f}", "search, geometric mean": "{search_ratio:.3f}",
})  # fmt: skip


OPTIONS = (
    option("--tree", type=Path, required=True, metavar="FOLDER"),
    *JOB_OPTIONS,
    option("--without", nargs="+", default=[], metavar="STRATEGY", help="left out"),
    option("--plans", type=Path, metavar="FOLDER", help="plans, kept between runs"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Search with both trees, job by job; the last row has the means, and the commits."""
    other = given.tree.resolve()
    rows = []
    yield COLUMNS
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        plans = given.plans.resolve() if given.plans else made
        plans.mkdir(parents=True, exist_ok=True)
        for job in all_jobs(given, made):
            rows.append(compare(job, other, plans, given.without))
            yield rows[-1]
    if any("other_step_s" in row and "ours_step_s" in row for row in rows):
        yield MEANS
        yield means(rows) | {"commits": {"ours": _commit(ROOT), "other": _commit(other)}}


def _commit(tree: Path) -> str:
    """Return the tree's commit, with a mark where files are changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=tree, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "no checkout"
