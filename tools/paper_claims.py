"""Do the headline claims of FlashFlex/HexiScale (arXiv 2409.01143) again, by simulation.

    python tools/paper_claims.py           benchmarks/results/paper.json, then docs/paper.md
    python tools/paper_claims.py --check   compare with the file instead (some twenty minutes)
    python tools/paper_claims.py --kept seconds.json      keep what is found, and go on from there
    python tools/paper_claims.py --only study             these clusters again, the others as before

Two claims: the MFU of mixed clusters beside homogeneous ones of equal total peak, and throughput
beside other ways to divide the same model over the same mixed cluster.  Every way plans with our
cost model, and one step of its plan is run by the event simulator: no GPU is involved, and
published figures, which were measured, are not comparable number for number.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import compare_strategies
import pages
import results
from results import Cell, Table

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.blocks import blocks
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.api import plan_cluster
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.limits import StockLimits
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.schedule.simulator.step import simulate_plan

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python tools/paper_claims.py"
SETTINGS = ROOT / "benchmarks" / "settings"
HOMOGENEOUS = ROOT / "benchmarks" / "paper"

WAYS: Mapping[str, tuple[str, bool]] = {
    "ours": ("auto", False),
    "ours, flags as given": ("auto", True),
    "published algorithm": ("hexiscale", False),
    "best of stock Megatron": ("stock", False),
    "even layers, one width": ("symmetric-even", False),
}
"""Strategy of each way, and if it is held to the job's own flags (full recompute).

The published algorithm knows no other settings than the job's.
"""
MANY_GPUS = 16
"""Mixed clusters of more have too many plans of stock Megatron to go through them all."""
LIMITS = StockLimits(num_cases=15_000, num_bounded=2_000_000, num_simulated=300)
"""Of the search over stock's flags, whose later simulations mostly prove that the best is found."""
GAPS = {"ours": "gap of ours, points", "published algorithm": "gap of the published algorithm"}
"""Column of the gap of each way."""
NETWORKS = {"Ethernet": "0.7 GB/s", "RDMA": "25 GB/s"}


@dataclass(frozen=True)
class Setting:
    """A mixed cluster and a model; `homogeneous` is the cluster of about its total peak.

    `published` are the paper's MFU of HexiScale here and of Megatron there, in percent, from the
    README of its code (A100-PCIe over TCP); None: not published.
    """

    name: str
    title: str
    homogeneous: str | None = None
    published: tuple[float, float] | None = None


MIXED = (
    Setting("case-study-13b", "case study: 3 A800, 3 RTX 4090, 2 RTX 3090; 13B"),
    Setting(
        "setting-1-7b",
        "setting 1: 8 RTX 3080 Ti, 8 RTX 3090, 24 RTX 4090; 7B",
        "a100-16",
        (31.19, 38.58),
    ),
    Setting("setting-1-13b", "setting 1; 13B", "a100-16", (27.23, 39.46)),
    Setting(
        "setting-3-30b",
        "setting 3: 8 RTX 3090, 40 RTX 4090, 8 A100; 30B",
        "a100-32",
        (27.49, 27.79),
    ),
)


def simulated_s(way: str, cluster: Cluster, workload: Workload) -> float | None:
    """Return the simulated seconds of a step of the method's plan; None where it finds none that
    fits."""
    strategy, as_given = WAYS[way]
    if strategy == "stock":
        plan = stock_plan(cluster, workload)
    else:
        planned = compare_strategies.plan_by(strategy, cluster, workload, as_given=as_given)
        if planned is None:
            return None
        plan = planned[0]
    return simulate_plan(plan, cluster).step_time_s


def stock_plan(cluster: Cluster, workload: Workload) -> Plan:
    """Find the best plan of stock Megatron: the better one of `plan --stock`, the best that our
    search finds among them, and of `plan --strategy stock` within `LIMITS`, which is left out on
    many unlike GPUs."""
    plans = [plan_cluster(cluster, workload, objective=Objective(stock_only=True))]
    alike = len({(node.gpu_type.name, node.num_gpus) for node in cluster.nodes}) == 1
    if alike or len(cluster.devices) <= MANY_GPUS:
        found = best_stock_plan(make_problem(cluster, workload), LIMITS)
        plans += [] if found is None else [found.plan]
    return min(plans, key=lambda plan: simulate_plan(plan, cluster).step_time_s)


def peak_flops(cluster: Cluster) -> float:
    """Sum the dense bf16 peaks of all GPUs of a cluster, used or not."""
    return sum(node.num_gpus * (node.gpu_type.peak_flops["bf16"] or 0.0) for node in cluster.nodes)


def mfu(seconds: float, cluster: Cluster, workload: Workload) -> float:
    """Divide the model FLOPs of a step by what the cluster's peaks would do meanwhile.

    A forward and twice as much backward, the causal half of the attention, recomputation not
    counted (Chowdhery et al. 2022, appendix B, with causal attention).
    """
    forward = sum(b.matmul_flops_forward + b.attention_flops_forward for b in blocks(workload))
    return 3 * forward * workload.training.global_batch_size / (seconds * peak_flops(cluster))


@dataclass(frozen=True)
class Kept:
    """Seconds that this very code found before, in a file; without one nothing is kept."""

    path: Path | None = None

    def seconds(self, title: str, way: str, cluster: Cluster, workload: Workload) -> float | None:
        """`simulated_s`, from the file if it is there."""
        found = self._read()
        key = f"{title}: {way}"
        if key not in found:
            seconds = simulated_s(way, cluster, workload)
            # Another process may have written meanwhile.
            found = {**self._read(), key: seconds}
            if self.path is not None:
                self.path.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{key}: {_seconds(seconds)}", file=sys.stderr, flush=True)
        return found[key]

    def _read(self) -> dict[str, float | None]:
        if self.path is None or not self.path.exists():
            return {}
        found: dict[str, float | None] = json.loads(self.path.read_text())
        return found


NOTHING_KEPT = Kept()


def result(settings: Sequence[Setting] = MIXED, kept: Kept = NOTHING_KEPT) -> results.Result:
    """Repeat both claims."""
    speed: list[list[Cell]] = []
    used: list[list[Cell]] = []
    for setting in settings:
        cluster = load_cluster(SETTINGS / setting.name / "cluster.yaml")
        workload = load_workload(SETTINGS / setting.name / "model.flags")
        seconds = {way: kept.seconds(setting.title, way, cluster, workload) for way in WAYS}
        speed.append([setting.title, *_speed_row(seconds, workload)])
        if setting.homogeneous is None:
            continue
        ours, theirs = (
            _percent(seconds[way], cluster, workload) for way in ("ours", "published algorithm")
        )
        for network, bandwidth in NETWORKS.items():
            path = HOMOGENEOUS / f"{setting.homogeneous}-{network.lower()}.yaml"
            equal = load_cluster(path)
            title = f"{path.stem} beside {setting.title}"
            stock = kept.seconds(title, "best of stock Megatron", equal, workload)
            beside = _percent(stock, equal, workload)
            used.append(
                [
                    setting.title,
                    f"{peak_flops(cluster) / 1e12:,.0f}",
                    _shown(ours),
                    _shown(theirs),
                    f"{len(equal.devices)} A100 ({peak_flops(equal) / 1e12:,.0f}), {network} "
                    f"{bandwidth}",
                    _shown(beside),
                    _gap(beside, ours),
                    _gap(beside, theirs),
                    _published(setting) if network == "Ethernet" else None,
                ]
            )
    tables = {
        "mfu": Table(
            (
                "mixed cluster", "peak, TFLOPS", "ours, MFU %", "published algorithm, MFU %",
                "homogeneous cluster (peak)", "best of stock, MFU %", "gap of ours, points",
                "gap of the published algorithm", "paper, measured: HexiScale, Megatron",
            ),
            used,
        ),
        "throughput": Table(("cluster, model", *_speed_columns()), speed),
    }  # fmt: skip
    return results.found(COMMAND, "computed", gap_figures(tables["mfu"]), tables)


def gap_figures(table: Table) -> dict[str, Cell]:
    """Return the mean and the least gap in points, for each way and network, of the table of MFU.
    """
    gaps: dict[str, list[float]] = {}
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        # "16 A100 (4,992), Ethernet 0.7 GB/s"
        network = str(cells["homogeneous cluster (peak)"]).split(", ")[-1].split(" ")[0]
        for whose, column in GAPS.items():
            if cells[column] != "-":
                gaps.setdefault(f"{whose}, {network}", []).append(float(str(cells[column])))
    figures: dict[str, Cell] = {}
    for whose, values in gaps.items():
        figures[f"mean gap of {whose}"] = f"{mean(values):.1f}"
        figures[f"least gap of {whose}"] = f"{min(values):.1f}"
    return figures


def again_in_part(now: results.Result, names: Sequence[str]) -> results.Result:
    """Put the rows of some clusters into the result that there is; the commit says which.

    Raises:
        SystemExit: the tables are others.
    """
    before = results.load("paper")
    tables = {
        name: table.with_rows(now.tables[name], name) for name, table in before.tables.items()
    }
    commit = f"{before.commit}; {', '.join(names)}: {now.commit}"
    return replace(now, commit=commit, figures=gap_figures(tables["mfu"]), tables=tables)


def _speed_columns() -> list[str]:
    others = [way for way in WAYS if way not in ("ours", "ours, flags as given")]
    return ["ours, tokens/s", *(f"ours over {way}" for way in ("flags as given", *others))]


def _speed_row(seconds: Mapping[str, float | None], workload: Workload) -> list[Cell]:
    ours = seconds["ours"]
    if ours is None:
        return ["no plan fits", *("" for _ in list(WAYS)[1:])]
    tokens = workload.training.global_batch_size * workload.model.seq_length
    row: list[Cell] = [f"{tokens / ours:,.0f}"]
    for way in list(WAYS)[1:]:
        other = seconds[way]
        row.append("no plan fits" if other is None else f"{other / ours:.2f}x")
    return row


def _percent(seconds: float | None, cluster: Cluster, workload: Workload) -> float | None:
    return None if seconds is None else 100 * mfu(seconds, cluster, workload)


def _shown(value: float | None) -> str:
    return "no plan fits" if value is None else f"{value:.1f}"


def _gap(homogeneous: float | None, mixed: float | None) -> str:
    return "-" if homogeneous is None or mixed is None else f"{homogeneous - mixed:.1f}"


def _published(setting: Setting) -> str | None:
    return None if setting.published is None else "{:.2f}, {:.2f}".format(*setting.published)


def _seconds(value: float | None) -> str:
    return "no plan fits" if value is None else f"{value:.3f} s"


def main(arguments: list[str] | None = None) -> int:
    """Write the result and render the page, or compare; status 1 where they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="seconds found so far")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="make the clusters with these words again"
    )
    options = parser.parse_args(arguments)
    words = options.only or [""]
    chosen = [setting for setting in MIXED if any(word in setting.title for word in words)]
    if not chosen:
        parser.error(f"--only: the clusters are {'; '.join(s.title for s in MIXED)}")
    now = result(chosen, Kept(options.kept))
    before = results.load("paper") if options.check or options.only else now
    if options.only:
        now = again_in_part(now, options.only)
    if options.check:
        same = (now.figures, now.tables) == (before.figures, before.tables)
        print("benchmarks/results/paper.json: " + ("as found now" if same else "out of date"))
        return 0 if same else 1
    results.save(now, "paper")
    return pages.main([str(ROOT / "docs" / "paper.md")])


if __name__ == "__main__":
    sys.exit(main())
