"""Compare our plans with HexiScale's algorithm and with the best symmetric plan, by simulation.

    python tools/compare_strategies.py [--settings FOLDER ...] [--json]

A setting is a folder with cluster.yaml and model.flags (benchmarks/settings/*).  Each strategy
plans it with our cost model; the event simulator runs one step of each plan; ratios are of
simulated step times.  "symmetric" has one width, one micro-batch count and one division of layers
for all replicas, with the layers of its stages balanced; "even layers" is Megatron without a
pipeline layout.  `paper` is what HexiScale's paper states of itself against other systems, on
machines: 1.5 to 2.4 times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.limits import CHOICES
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import HeteroError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.schedule.simulator.step import simulate_plan

SETTINGS = Path(__file__).resolve().parent.parent / "benchmarks" / "settings"
STRATEGIES = {
    "ours": "auto",
    "ours, flags as given": "auto",
    "hexiscale": "hexiscale",
    "symmetric": "symmetric",
    "symmetric, even layers": "symmetric-even",
}
PAPER = (1.5, 2.4)


def compare(folder: Path) -> dict[str, Any]:
    """Compare the strategies in one setting: simulated and predicted seconds, search time and
    layout; None where a strategy finds no plan that fits."""
    cluster = load_cluster(folder / "cluster.yaml")
    workload = load_workload(folder / "model.flags")
    found: dict[str, dict[str, Any] | None] = {}
    for name, strategy in STRATEGIES.items():
        started = time.perf_counter()
        planned = plan_by(strategy, cluster, workload, as_given=name.endswith("given"))
        if planned is None:
            found[name] = None
            continue
        plan, predicted_s = planned
        search_s = time.perf_counter() - started
        simulation = simulate_plan(plan, cluster)
        found[name] = {
            "simulated_s": simulation.step_time_s,
            "predicted_s": predicted_s,
            "search_s": search_s,
            "layout": format_layout(plan.layout),
        }

    def ratio(slower: str, faster: str) -> float | None:
        one, other = found[slower], found[faster]
        return one["simulated_s"] / other["simulated_s"] if one and other else None

    return {
        "setting": folder.name,
        "strategies": found,
        "ours_over_hexiscale": ratio("hexiscale", "ours"),
        "ours_as_given_over_hexiscale": ratio("hexiscale", "ours, flags as given"),
        "ours_over_symmetric": ratio("symmetric", "ours"),
        "ours_over_even": ratio("symmetric, even layers", "ours"),
        "hexiscale_over_even": ratio("symmetric, even layers", "hexiscale"),
        "paper": PAPER,
    }


def plan_by(
    strategy: str, cluster: Cluster, workload: Workload, as_given: bool
) -> tuple[Plan, float] | None:
    """Return a strategy's plan and its predicted seconds, without the bound, which takes time."""
    if as_given:
        cluster = replace(cluster, limits=replace(cluster.limits, as_given=CHOICES))
    problem = make_problem(cluster, workload)
    best = Rescorer(search(problem, strategies=strategies_of(strategy))).best()
    return None if best is None else (bare_plan(problem, best, {}), best.step_time_s)


def lines(result: dict[str, Any]) -> list[str]:
    """Write the comparison for people."""
    text = [result["setting"]]
    for name, plan in result["strategies"].items():
        if plan is None:
            text.append(f"  {name:<23} no plan fits")
            continue
        text.append(
            f"  {name:<23} {plan['simulated_s']:9.3f} s simulated, {plan['predicted_s']:9.3f} s "
            f"predicted, searched {plan['search_s']:.1f} s"
        )
        text.append(f"      {plan['layout']}")
    for name, words in (
        ("ours_over_hexiscale", "ours over HexiScale's algorithm"),
        ("ours_as_given_over_hexiscale", "the same, flags as given"),
        ("ours_over_symmetric", "ours over the best symmetric plan"),
        ("ours_over_even", "ours over the best symmetric plan with even layers"),
        ("hexiscale_over_even", "HexiScale's algorithm over the same"),
    ):
        value = result[name]
        text.append(f"  {words}: " + ("-" if value is None else f"{value:.2f}x"))
    text.append(f"  (the paper, on machines, against other systems: {PAPER[0]}x to {PAPER[1]}x)")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--settings", nargs="+", type=Path, metavar="FOLDER", help="default: all")
    parser.add_argument("--json", action="store_true", help="a list, for programs")
    options = parser.parse_args(arguments)
    results = []
    for folder in options.settings or sorted(p for p in SETTINGS.iterdir() if p.is_dir()):
        try:
            results.append(compare(folder))
        except HeteroError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        if not options.json:
            print("\n".join(lines(results[-1])), flush=True)
    if options.json:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
