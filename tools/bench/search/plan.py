"""Processor seconds of the whole command `plan`, part by part, as the cluster grows.

    python tools/bench plan [--sizes 3 6 16 64 1024 10240] [--beside FOLDER] [--turns N]

Each turn is the command line as a user types it, in a process of its own on one core, with bytecode
compiled before.  3, 6 and 16 GPUs are examples, larger clusters are made up (`scale_clusters`).
With --beside, another checkout takes turns with this one, and the table says whether both write the
same plan.  Without it, turns have to agree among themselves.

Parts: `import` is all before the command begins; `read` is the files; `search` is also the choice
among what it found; `stock` is the best of stock Megatron, and `rows` the plans by hand beside it;
`bound` is the lower bound and the estimates written with it; `simple` is the simplest plan near the
best; `notes` are advice and faster flags; `other` is the rest, printing and the end of the process
among it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.jobs import ROOT
from tools.bench.show import Columns, option
from tools.scale_clusters import write_case

SIZES = (3, 6, 16, 64, 1024, 10_240)
PARTS = ("import", "read", "search", "stock", "rows", "bound", "simple", "notes", "other")
EXAMPLES = {
    3: ("one-workstation/cluster.yaml", "one-workstation/llama-1.5b.flags"),
    6: ("lost-node/before.yaml", "lost-node/gpt-6.7b.flags"),
    16: ("two-sites/cluster.yaml", "two-sites/gpt-2.7b.flags"),
}
_FUNCTIONS = {
    "read": ("cluster.file.description.load_cluster", "model.load.load_workload",
             "model.load.load_arguments"),
    "search": ("planner.portfolio.search", "planner.found.best_or_error",
               "planner.exchange_groups.with_groups"),
    "stock": ("planner.stock.search.stock_beside_a_plan",),
    "rows": ("planner.advise.explain.explain_candidate",),
    "bound": ("bounds.estimate.estimates_of",),
    "simple": ("planner.advise.simplest.simplest", "planner.advise.alternatives.simplest_beside"),
    "notes": ("planner.faster_flags.faster_flags", "report.text.refusals.note_lines",
              "planner.advise.idle.idle_reasons"),
}  # fmt: skip

_CHILD = """
import os, resource, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
tree, functions, *argv = sys.argv[1:]
sys.path.insert(0, tree)
import importlib, json
from functools import wraps
from megatron_hetero.cli.main import _load, leave, main
_load("plan")
spent, inner = {"import": time.process_time()}, [0.0]

def timed(part, function):
    @wraps(function)
    def call(*args, **keywords):
        inner.append(0.0)
        started = time.process_time()
        try:
            return function(*args, **keywords)
        finally:
            took = time.process_time() - started
            spent[part] = spent.get(part, 0.0) + took - inner.pop()
            inner[-1] += took
    return call

for part, names in json.loads(functions).items():
    for name in names:
        module, _, function = name.rpartition(".")
        try:
            original = getattr(importlib.import_module("megatron_hetero." + module), function)
        except (ImportError, AttributeError):
            continue  # another commit may have it elsewhere: its time is in "other"
        wrapper = timed(part, original)
        for loaded in list(sys.modules.values()):
            if getattr(loaded, "__name__", "").startswith("megatron_hetero"):
                for key, value in list(vars(loaded).items()):
                    if value is original:
                        setattr(loaded, key, wrapper)
code = main(argv)
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"parts": spent, "mib": mib}), file=sys.stderr)
leave(code)
"""


@dataclass(frozen=True)
class Run:
    """One turn: seconds by part, all of them, MiB at the most, and a hash of the plan."""

    parts: dict[str, float]
    cpu_s: float
    mib: float
    plan: str


def case_of(num_gpus: int, folder: Path) -> tuple[Path, Path]:
    """Return the files of the cluster and the job of a size."""
    if num_gpus in EXAMPLES:
        cluster, model = EXAMPLES[num_gpus]
        return ROOT / "examples" / cluster, ROOT / "examples" / model
    return write_case(num_gpus, folder)


def run_once(tree: Path, case: tuple[Path, Path], folder: Path) -> Run:
    """Run `plan` of a checkout once, in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    plan = folder / "plan.json"
    words = ("plan", "--cluster", str(case[0]), "--model", str(case[1]), "-o", str(plan))
    environment = {name: value for name, value in os.environ.items() if name != _NO_BYTECODE}
    before_s = _children_s()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tree), json.dumps(_FUNCTIONS), *words],
        env={**environment, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")},
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode or not plan.exists():
        raise RuntimeError(f"{tree}, {case[0]}: {done.stderr}")
    # What is in no part, the end of the process among it.
    cpu_s = _children_s() - before_s
    found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    parts = {**found["parts"], "other": cpu_s - sum(found["parts"].values())}
    digest = hashlib.sha256(plan.read_bytes()).hexdigest()
    plan.unlink()
    return Run(parts, cpu_s, found["mib"], digest)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


def bench(num_gpus: int, trees: Sequence[Path], turns: int, folder: Path) -> list[list[Run]]:
    """Return the runs of each tree, which take turns.

    Raises:
        RuntimeError: a run failed, or two runs of one tree wrote different plans.
    """
    case = case_of(num_gpus, folder)
    runs: list[list[Run]] = [[] for _ in trees]
    for _ in range(turns):
        for tree, own in zip(trees, runs, strict=True):
            own.append(run_once(tree, case, folder))
    for tree, own in zip(trees, runs, strict=True):
        if len({run.plan for run in own}) > 1:
            raise RuntimeError(f"{tree}, {num_gpus} GPUs: equal inputs gave unequal plans")
    return runs


def row(num_gpus: int, name: str, runs: Sequence[Run], same: str) -> list[str]:
    """Return the cells of a row: medians of the runs."""
    parts = [statistics.median(run.parts.get(part, 0.0) for run in runs) for part in PARTS]
    return [
        f"{num_gpus:,}",
        *([name] if name else []),
        f"{statistics.median(run.cpu_s for run in runs):.2f}",
        *(f"{part:.2f}" for part in parts),
        f"{max(run.mib for run in runs):.0f}",
        *([same] if name else []),
    ]


OPTIONS = (
    option("--sizes", nargs="+", type=int, default=SIZES, metavar="N"),
    option("--beside", type=Path, metavar="FOLDER", help="another checkout"),
    option("--turns", type=int, default=1, metavar="N"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Run the command in turns for each size."""
    beside = given.beside
    trees = [ROOT] if beside is None else [beside.resolve(), ROOT]
    names = [""] if beside is None else ["before", "now"]
    titles = ["GPUs", *(["tree"] if beside else []), "CPU s", *PARTS, "MiB"]
    yield Columns.of([*titles, *(["plan"] if beside else [])])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for tree in trees:  # compiles the bytecode
            run_once(tree, case_of(min(EXAMPLES), folder), folder)
        for num_gpus in given.sizes:
            runs = bench(num_gpus, trees, given.turns, folder)
            is_same = len({own[0].plan for own in runs}) == 1
            for name, own in zip(names, runs, strict=True):
                yield row(num_gpus, name, own, "equal" if is_same else "differs")
