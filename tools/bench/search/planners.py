"""Plan benchmark cases by other systems' cost models, and score the plans by them.

    python tools/bench planners [--cases FILE ...] [--drawn [HASH]] [--only NAME ...] [--prove]
        [--layouts] [--json]

Each case (benchmarks/cases/*.yaml, docs/benchmarks.md) is planned by `megatron_hetero.planner` with
the referee's own prices, once for each micro-batch size that it allows; the best plan is scored by
the referee's formulas.  A case runs in a process of its own, on one core; `search_s` is its time
on that core, so that other work on the machine does not count.  With --prove bounds are proved as
far as with `plan --prove`.  With --drawn the cases are twelve of 512 to 1,024 GPUs that follow from
a hash, by default of the last commit that changed the planner, beside a plain enumeration.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_hetero.bounds.effort import PROOF
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import InfeasiblePlanError, UnsupportedError
from megatron_hetero.files import canonical_json, read_yaml
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.idle import idle_reasons
from megatron_hetero.planner.answer.planned import plan_of
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.found import infeasible_or_limits
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from tools.bench.alone import alone
from tools.bench.jobs import ROOT, quoted
from tools.bench.show import Columns, option
from tools.drawn_clusters import planner_commit
from tools.referees.cases import Case, Question, load_case
from tools.referees.drawn_cases import drawn_cases, with_anchor
from tools.referees.waiting.bound import referee_bound

RESULT_FIELDS = (
    "case",
    "referee",
    "gpus",
    "score",
    "unit",
    "anchor",
    "ratio",
    "bound",
    "gap",
    "search_s",
    "peak_memory_mib",
    "fits",
)
COLUMNS = Columns({
    "case": "{case}", "GPUs": "{gpus}",
    "score": lambda row: "-" if row["score"] is None else f"{row['score']:.4f} {row['unit']}",
    "anchor": "{anchor:.4f}", "ratio": "{ratio:.3f}", "bound": "{bound:.4f}",
    "gap %": lambda row: "-" if row["gap"] is None else f"{100 * row['gap']:.1f}",
    "search s": "{search_s:.1f}", "MiB": "{peak_memory_mib:.0f}",
    "fits": lambda row: "yes" if row["fits"] else "NO",
})  # fmt: skip
CASES = ROOT / "benchmarks" / "cases"


def run_case(case: Case, prove: bool = False) -> tuple[dict[str, Any], str]:
    """Return the result of one case (see `RESULT_FIELDS`) and the layout of its plan.

    `bound` is in the anchor's unit and holds over all micro-batch sizes; `score`, `ratio`, `gap`
    are None and `fits` is False where no plan was found.
    """
    bounds_s: list[float] = []
    best: tuple[float, bool, str] | None = None
    started = time.process_time()
    for question in case.questions:
        found = _plan(question, prove)
        if found is None:
            continue
        step_s, fits, bound_s, layout = found
        bounds_s.append(bound_s)
        if best is None or step_s < best[0]:
            best = step_s, fits, layout
    search_s = time.process_time() - started
    model = case.model
    result: dict[str, Any] = {
        "case": model.case,
        "referee": model.referee,
        "gpus": sum(of.gpus * of.count for of in model.cluster.machines),
        "score": best and case.score(best[0]),
        "unit": model.anchor.unit,
        "anchor": model.anchor.value,
        "ratio": best and case.ratio(best[0]),
        "bound": case.score(min(bounds_s)) if bounds_s else None,
        "gap": best and best[0] / min(bounds_s) - 1,
        "search_s": search_s,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "fits": best is not None and best[1],
    }
    return result, best[2] if best else "no plan found"


def run_file(path: Path, prove: bool = False) -> tuple[dict[str, Any], str]:
    """Return `run_case` of a file.

    Raises:
        HeteroError: the file is no case.
    """
    return run_case(load_case(path), prove)


def _plan(question: Question, prove: bool) -> tuple[float, bool, float, str] | None:
    """Return (seconds by the referee, fits by the referee, bound, layout) of the plan, if there is
    one."""
    try:
        plan = _planned(question, prove)
        score = question.score(placement_of(plan, question.cluster))
    except (InfeasiblePlanError, UnsupportedError):
        return None
    if plan.estimates is None or plan.estimates.bound_s is None:
        raise RuntimeError("the planner gives every plan estimates and a bound")
    size = question.workload.training.micro_batch_size
    layout = f"micro-batch size {size}: {format_layout(plan.layout)}"
    return score.step_s, score.missing_bytes <= 0, plan.estimates.bound_s, layout


def _planned(question: Question, prove: bool) -> Plan:
    """Return the plan of the users' search under a referee's prices.

    Raises:
        InfeasiblePlanError: nothing fits.
    """
    problem = make_problem(question.cluster, question.workload, None, question.make_costs)
    board = search(problem)
    best = Rescorer(board).best()
    if best is None:
        raise infeasible_or_limits(problem, board)
    proof = partial(referee_bound, effort=PROOF) if prove else referee_bound
    return plan_of(problem, best, idle_reasons(problem, best), prove=proof)


def drawn_files(commit: str, folder: Path) -> Iterator[Path]:
    """Yield files of the cases that follow from a hash, each once its anchor is known."""
    for number, case in enumerate(drawn_cases(commit)):
        path = folder / f"{number}.yaml"
        path.write_text(canonical_json(with_anchor(case)))  # JSON is YAML
        yield path


def named(paths: Iterable[Path], only: Sequence[str] | None) -> Iterator[Path]:
    """Yield the files of cases with one of the names, up to a colon; of all if none is given."""
    for path in paths:
        name = read_yaml(path).data["case"]
        if only is None or str(name).partition(":")[0] in only:
            yield path


OPTIONS = (
    option("--cases", nargs="+", type=Path, metavar="FILE", help="default: all"),
    option(
        "--drawn", nargs="?", const="", metavar="HASH", help="cases that follow from a hash instead"
    ),
    option(
        "--only", nargs="+", metavar="NAME", help="cases whose name, up to a colon, is one of these"
    ),
    option("--prove", action="store_true", help="bounds as of `plan --prove`"),
    option("--layouts", action="store_true", help="a column of plans"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Plan each case in a process of its own."""
    yield Columns(COLUMNS | {"plan": "{layout}"}) if given.layouts else COLUMNS
    with tempfile.TemporaryDirectory() as folder:
        paths: Iterable[Path] = given.cases or sorted(CASES.glob("*.yaml"))
        if given.drawn is not None:
            paths = drawn_files(given.drawn or planner_commit(), Path(folder))
        for path in named(paths, given.only):
            row, layout = alone(run_file, path, given.prove)
            yield row | {"layout": quoted(layout)} if given.layouts else row
