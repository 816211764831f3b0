"""Rehearse four plans on each of thirteen mixed clusters: how far predictions are off, and how much
longer stock Megatron's best plan takes than ours.

    python tools/bench rehearse --out rehearsals.json > rehearsals.md

The plans of a cluster: the planner's; the best that stock Megatron can run, of all that its flags
can say (`planner.stock.search`); the best of those with another grid (replicas, stages, width); and
the best that needs the plug-in and has another number of replicas or of stages than the planner's.
Where the best of stock is interleaved, the best without is rehearsed too, and the faster counts.
The planner is asked with micro-batches of 1, 2 and 4, as a user can who may choose; stock
Megatron's search chooses among all sizes and kinds of recompute.

The clusters were written down before anything was measured on them, five of them ("2 offices", the
H100 with desktops, and the three of labs) by rough reckoning of where 1F1B or equal replicas must
pay; all are here.
A rehearsal that is in the file given with --out already is not run again, and plans that
are in the folder given with --plans are not searched again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.answer.planned import plan_of
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.stock.limits import StockLimits
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from tools.bench.jobs import CLUSTERS, MODELS, ROOT, quoted
from tools.bench.show import Columns, is_chosen, only, option

MICRO_BATCH_SIZES = (1, 2, 4)
STOCK_LIMITS = StockLimits(num_bounded=4_000_000, num_simulated=4_000)


@dataclass(frozen=True)
class Case:
    """A plan to rehearse."""

    cluster_name: str
    kind: str
    plan: Plan
    cluster: Cluster

    @property
    def key(self) -> str:
        return f"{self.cluster_name} / {self.kind}"


def kept_cases(name: str, folder: Path | None) -> Iterable[Case]:
    """Read the plans of a cluster from the folder, if they are there."""
    if folder is None:
        return cases(name)
    own = folder / name.replace(" ", "-")
    if not own.exists():
        found = list(cases(name))
        own.mkdir(parents=True)
        for number, case in enumerate(found):
            save_plan(case.plan, own / f"{number} {case.kind}.json")
    cluster = load_cluster(ROOT / CLUSTERS[name][0])
    return [
        Case(name, path.stem.partition(" ")[2], load_plan(path), cluster)
        for path in sorted(own.glob("*.json"))
    ]


def cases(name: str) -> Iterator[Case]:
    """Make the four plans of a cluster."""
    cluster_file, model = CLUSTERS[name]
    cluster = load_cluster(ROOT / cluster_file)
    workload = _workload(model)
    problem, board, best = _best_job(cluster, model)
    yield Case(name, "planned", plan_of(problem, best, {}), cluster)
    stock = best_stock_plan(make_problem(cluster, workload), STOCK_LIMITS)
    if stock is None:
        raise SystemExit(f"{name}: no plan of stock Megatron")
    proof = "" if stock.is_exact else ", perhaps not the best"
    print(f"{name}: stock Megatron's best of {stock.num_bounded}{proof}", file=sys.stderr)
    yield Case(name, "best of stock", stock.plan, cluster)
    if stock.plan.schedule == "interleaved":
        plain = best_stock_plan(
            make_problem(cluster, workload), replace(STOCK_LIMITS, most_chunks=1)
        )
        if plain is not None:
            yield Case(name, "best of stock, not interleaved", plain.plan, cluster)
    for plan in stock.others[:1]:
        yield Case(name, "another of stock", plan, cluster)
    shape = _shape(best)
    asymmetric = [c for c in board.ranking_with_counts if c.rank_order is None and c is not best]
    unlike = [c for c in asymmetric if _shape(c) != shape]
    if unlike or asymmetric:
        other = (unlike or asymmetric)[0]
        yield Case(name, "another asymmetric one", plan_of(problem, other, {}), cluster)


def _best_job(cluster: Cluster, model: str) -> tuple[Problem, Scoreboard, Candidate]:
    """Return the planner's best plan over the micro-batch sizes of the job."""
    found: list[tuple[float, int, Problem, Scoreboard, Candidate]] = []
    for size in MICRO_BATCH_SIZES:
        problem = make_problem(cluster, _workload(model, f"--micro-batch-size={size}"))
        board = search(problem, None, strategies_of("auto"))
        if board.best is not None:
            plan = plan_of(problem, board.best, {})
            step_s = simulate_plan(plan, cluster).step_time_s
            found.append((step_s, len(found), problem, board, board.best))
    if not found:
        raise SystemExit("no plan")
    _, _, problem, board, best = min(found, key=lambda entry: entry[:2])
    return problem, board, best


def _workload(model: str, *more: str) -> Workload:
    script, flags = MODELS[model]
    return load_workload(ROOT / script, (*flags, *more))


def _shape(candidate: Candidate) -> tuple[int, ...]:
    return tuple(sorted(len(replica.stages) for replica in candidate.placement.replicas))


def rehearsed(case: Case, steps: int) -> dict[str, Any]:
    """Return the figures of one rehearsal."""
    from megatron_hetero.runtime.job.local.loading import preload

    preload()
    from megatron_hetero.lab.rehearse.run import RehearsalOptions, rehearse

    with tempfile.TemporaryDirectory() as folder:
        found = rehearse(case.plan, case.cluster, None, RehearsalOptions(steps=steps), Path(folder))
    return {
        "is_stock": found.is_stock,
        "num_ranks": case.plan.layout.num_devices,
        "predicted_step_time_s": found.predicted.step_time_s,
        "rehearsed_step_time_s": found.step_time_s,
        "error": found.error,
        "time_scale": found.time_scale,
        "num_disturbed": found.num_disturbed,
    }


REHEARSED = Columns({
    "cluster / plan": "{key}", "layout": lambda row: quoted(row["layout"]),
    "runs in": lambda row: "stock" if row["is_stock"] else "plug-in",
    "predicted": "{predicted_step_time_s:.3f} s", "rehearsed": "{rehearsed_step_time_s:.3f} s",
    "error": "{error:+.2%}",
})  # fmt: skip


OPTIONS = (
    option("--out", type=Path, required=True, help="results, kept between runs"),
    option("--steps", type=int, default=1, help="undisturbed steps (default: 1)"),
    only("clusters"),
    option("--kinds", nargs="*", help="kinds of plans (default: all)"),
    option("--plans", type=Path, help="folder of plans, kept between runs"),
    option("--predict", action="store_true", help="simulate only"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any] | list[str] | str]:
    """Rehearse what the file of results has not yet, and yield all that it has then."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in CLUSTERS:
        if not is_chosen(name, given.only):
            continue
        for case in kept_cases(name, given.plans):
            if given.kinds and case.kind not in given.kinds:
                continue
            predicted = simulate_plan(case.plan, case.cluster).step_time_s
            layout = format_layout(case.plan.layout)
            print(f"{case.key}: {layout}, predicted {predicted:.3f} s", file=sys.stderr)
            if given.predict or case.key in results:
                continue
            results[case.key] = {"layout": layout, **rehearsed(case, given.steps)}
            given.out.write_text(json.dumps(results, indent=1))
    yield REHEARSED
    yield from ({"key": key, **result} for key, result in results.items())
    errors = [abs(result["error"]) for result in results.values()]
    if errors:
        mean = sum(errors) / len(errors)
        yield f"{len(errors)} plans: mean error {mean:.2%}, worst {max(errors):.2%}\n"
    yield Columns.of(("cluster, model", "ours", "best of stock", "ratio"))
    gains = []
    for name, (_, model) in CLUSTERS.items():
        planned, *stocks = (
            results.get(f"{name} / {kind}")
            for kind in ("planned", "best of stock", "best of stock, not interleaved")
        )
        times_s = [result["rehearsed_step_time_s"] for result in stocks if result]
        if planned and times_s:
            ours, stock = planned["rehearsed_step_time_s"], min(times_s)
            gains.append((stock / ours, [f"{name}, {model}", f"{ours:.3f} s", f"{stock:.3f} s"]))
    # The largest gain first.
    yield from ([*row, f"{ratio:.2f}"] for ratio, row in sorted(gains, reverse=True))
