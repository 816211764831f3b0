"""Rehearse four plans on each of five mixed clusters: how far predictions are off, and how much
longer stock Megatron's best plan takes than ours.

    python tools/bench_rehearse.py --out rehearsals.json > rehearsals.md

The plans of a cluster: the planner's; the best that stock Megatron can run; the best of those with
another grid (replicas, stages, width) or, if there is none, another split; and the best that needs
the plug-in and has another number of replicas or of stages than the planner's.  The best of stock
is searched by simulating it as stock Megatron runs it: all grids of equal replicas in all orders of
nodes, recompute as the job has it, and from their even and balanced splits every move of a layer
between stages that makes it faster.

A rehearsal that is in the file given with --out already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_hetero.cluster.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import Placement
from megatron_hetero.flags.stock import is_stock
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.run import search, strategies_of
from megatron_hetero.planner.scoreboard import Candidate, Scoreboard
from megatron_hetero.planner.search import plan_of
from megatron_hetero.planner.symmetric import Symmetric
from megatron_hetero.schedule.step import simulate_plan

ROOT = Path(__file__).resolve().parents[1]
CLUSTERS = {
    "A100 + 4 RTX 4090": ("examples/a100-rtx4090/cluster.yaml", "7b"),
    "2 RTX 3080 + 2 RTX 4090": ("examples/rtx3080-rtx4090/cluster.yaml", "1.3b"),
    "H100 + 4 A10": ("benchmarks/rehearsal/h100-a10.yaml", "5b"),
    "3 sites of 2 A100": ("benchmarks/rehearsal/three-sites.yaml", "1.3b"),
    "2 RTX 3090 + A6000 + 2 L4": ("benchmarks/rehearsal/three-types.yaml", "1.3b"),
}
MODELS = {
    "7b": ("examples/a100-rtx4090/gpt-7b.sh", ("--global-batch-size=16",)),
    "5b": ("examples/a100-rtx4090/gpt-7b.sh", ("--global-batch-size=16", "--num-layers=24")),
    "1.3b": ("examples/rtx3080-rtx4090/gpt-1.3b.sh", ("--global-batch-size=24",)),
}
NUM_STOCK_STARTS = 12
"""Candidates of stock Megatron, best first by the cost model, from which layers are moved."""


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


class _AllStock(Scoreboard):
    """Remembers every candidate that stock Megatron can run."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self.found: list[Candidate] = []

    def score(self, placement: Placement, strategy: str) -> Candidate | None:
        candidate = super().score(placement, strategy)
        if candidate is not None and candidate.rank_order is not None:
            self.found.append(candidate)
        return candidate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="results, kept between runs")
    parser.add_argument("--steps", type=int, default=1, help="undisturbed steps (default: 1)")
    parser.add_argument("--only", help="clusters whose name contains this")
    parser.add_argument("--predict", action="store_true", help="simulate only")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in CLUSTERS:
        if options.only and options.only not in name:
            continue
        for case in cases(name):
            stock = is_stock(case.plan)
            predicted = simulate_plan(case.plan, case.cluster, is_stock=stock).step_time_s
            layout = format_layout(case.plan.layout)
            print(f"{case.key}: {layout}, predicted {predicted:.3f} s", file=sys.stderr)
            if options.predict or case.key in results:
                continue
            results[case.key] = {"layout": layout, **rehearsed(case, options.steps)}
            options.out.write_text(json.dumps(results, indent=1))
    report(results)
    return 0


def cases(name: str) -> Iterator[Case]:
    """The four plans of a cluster."""
    cluster_file, model = CLUSTERS[name]
    cluster = load_cluster(ROOT / cluster_file)
    script, flags = MODELS[model]
    workload = load_workload(ROOT / script, flags)
    problem = make_problem(cluster, workload)
    board = search(problem, None, strategies_of("auto"))
    best = board.best
    if best is None:
        raise SystemExit(f"{name}: no plan")
    yield Case(name, "planned", plan_of(problem, best, {}), cluster)
    stock = stock_plans(cluster, workload)
    yield Case(name, "best of stock", stock[0], cluster)
    others = [plan for plan in stock if _grid(plan) != _grid(stock[0])]
    yield Case(name, "another of stock", next(iter([*others, *_moves(stock[0])])), cluster)
    shape = _shape(best)
    asymmetric = [c for c in board.ranking_with_counts if c.rank_order is None and c is not best]
    unlike = [c for c in asymmetric if _shape(c) != shape]
    if unlike or asymmetric:
        other = (unlike or asymmetric)[0]
        yield Case(name, "another asymmetric one", plan_of(problem, other, {}), cluster)


def _shape(candidate: Candidate) -> tuple[int, ...]:
    return tuple(sorted(len(replica.stages) for replica in candidate.placement.replicas))


def stock_plans(cluster: Cluster, workload: Workload) -> list[Plan]:
    """Plans of stock Megatron, the fastest first, simulated as stock Megatron runs them."""
    problem = make_problem(cluster, workload)
    board = _AllStock(problem)
    Symmetric().search(board)
    starts = sorted(board.found, key=lambda candidate: candidate.key)[:NUM_STOCK_STARTS]
    plans = [_moved(plan_of(problem, candidate, {}), cluster) for candidate in starts]
    return sorted(plans, key=lambda plan: _stock_time_s(plan, cluster))


def _grid(plan: Plan) -> tuple[int, int, int]:
    stages = plan.replicas[0].stages
    return len(plan.replicas), len(stages), stages[0].shape.tensor_parallel


def _moved(plan: Plan, cluster: Cluster) -> Plan:
    """Move single layers between stages, of all replicas alike, as long as that helps."""
    best_s = _stock_time_s(plan, cluster)
    while True:
        better = min(_moves(plan), key=lambda p: _stock_time_s(p, cluster), default=plan)
        time_s = _stock_time_s(better, cluster)
        if time_s >= best_s * (1 - 1e-9):
            return plan
        plan, best_s = better, time_s


def _moves(plan: Plan) -> Iterator[Plan]:
    layers = [stage.shape.num_layers for stage in plan.replicas[0].stages]
    for giver in range(len(layers)):
        for taker in range(len(layers)):
            if giver != taker and layers[giver] > 1:
                moved = list(layers)
                moved[giver] -= 1
                moved[taker] += 1
                yield _with_layers(plan, moved)


def _with_layers(plan: Plan, layers: list[int]) -> Plan:
    replicas = []
    for replica in plan.replicas:
        stages, first = [], 0
        for stage, count in zip(replica.stages, layers, strict=True):
            shape = replace(stage.shape, num_layers=count)
            stages.append(replace(stage, shape=shape, first_layer=first))
            first += count
        replicas.append(replace(replica, stages=tuple(stages)))
    return replace(plan, replicas=tuple(replicas), estimates=None)


def _stock_time_s(plan: Plan, cluster: Cluster) -> float:
    found = simulate_plan(plan, cluster, is_stock=True)
    fits = all(s.peak_memory_bytes <= s.capacity_bytes for s in found.timelines)
    return found.step_time_s if fits else float("inf")


def rehearsed(case: Case, steps: int) -> dict[str, Any]:
    """Figures of one rehearsal."""
    from megatron_hetero.runtime.local_launch import preload

    preload()
    from megatron_hetero.runtime.rehearse.run import Options, rehearse

    with tempfile.TemporaryDirectory() as folder:
        found = rehearse(case.plan, case.cluster, None, Options(steps=steps), Path(folder))
    return {
        "is_stock": found.is_stock,
        "num_ranks": case.plan.layout.num_devices,
        "predicted_step_time_s": found.predicted.step_time_s,
        "rehearsed_step_time_s": found.step_time_s,
        "error": found.error,
        "time_scale": found.time_scale,
        "num_disturbed": found.num_disturbed,
    }


def report(results: dict[str, Any]) -> None:
    """Markdown on standard output."""
    print("| cluster / plan | layout | runs in | predicted | rehearsed | error |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for key, r in results.items():
        runner = "stock" if r["is_stock"] else "plug-in"
        print(
            f"| {key} | `{r['layout'].replace('|', chr(92) + '|')}` | {runner} "
            f"| {r['predicted_step_time_s']:.3f} s | {r['rehearsed_step_time_s']:.3f} s "
            f"| {r['error']:+.2%} |"
        )
    errors = [abs(r["error"]) for r in results.values()]
    if errors:
        mean = sum(errors) / len(errors)
        print(f"\n{len(errors)} plans: mean error {mean:.2%}, worst {max(errors):.2%}\n")
    print("| cluster | planned | best of stock | ratio |\n| --- | ---: | ---: | ---: |")
    for name in CLUSTERS:
        pair = [results.get(f"{name} / {kind}") for kind in ("planned", "best of stock")]
        if all(pair):
            ours, stock = (r["rehearsed_step_time_s"] for r in pair)
            print(f"| {name} | {ours:.3f} s | {stock:.3f} s | {stock / ours:.2f} |")


if __name__ == "__main__":
    raise SystemExit(main())
