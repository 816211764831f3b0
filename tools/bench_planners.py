"""Plan benchmark cases by other systems' cost models, and score the plans by them.

    python tools/bench_planners.py [--cases FILE ...] [--drawn [HASH]] [--only NAME ...] [--prove]
        [--json]

Each case (benchmarks/cases/*.yaml, docs/benchmarks.md) is planned by `megatron_hetero.planner` with
the referee's own prices, once for each micro-batch size that it allows; the best plan is scored by
the referee's formulas.  A case runs in a process of its own, on one core; `search_s` is its time
on that core, so that other work on the machine does not count.  With --prove bounds are proved as
far as with `plan --prove`.  With --drawn the cases are twelve of 512 to 1,024 GPUs that follow from
a hash, by default of the last commit that changed the planner, beside a plain enumeration.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from megatron_hetero.bounds.effort import PROOF  # noqa: E402
from megatron_hetero.cost.placing import placement_of  # noqa: E402
from megatron_hetero.errors import HeteroError, InfeasiblePlanError, UnsupportedError  # noqa: E402
from megatron_hetero.files import canonical_json, read_yaml  # noqa: E402
from megatron_hetero.plan.layout import format_layout  # noqa: E402
from megatron_hetero.plan.plan import Plan  # noqa: E402
from megatron_hetero.planner.advise.idle import idle_reasons  # noqa: E402
from megatron_hetero.planner.api import plan_of  # noqa: E402
from megatron_hetero.planner.evaluate.rescore import Rescorer  # noqa: E402
from megatron_hetero.planner.found import infeasible_or_limits  # noqa: E402
from megatron_hetero.planner.portfolio import search  # noqa: E402
from megatron_hetero.planner.problem import make_problem  # noqa: E402
from tools.drawn_clusters import planner_commit  # noqa: E402
from tools.referees.cases import Case, Question, load_case  # noqa: E402
from tools.referees.drawn_cases import drawn_cases, with_anchor  # noqa: E402
from tools.referees.waiting.bound import referee_bound  # noqa: E402

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


def _run_in_child(path: str, prove: bool, pipe: Connection) -> None:
    try:
        pipe.send(run_case(load_case(path), prove))
    except HeteroError as error:
        pipe.send(error)
    finally:
        pipe.close()


def run_file(path: Path, prove: bool = False) -> tuple[dict[str, Any], str]:
    """`run_case` in a process of its own, so that its peak memory is its own.

    Raises:
        HeteroError: the file is no case.
        RuntimeError: the process died.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(
        target=_run_in_child, args=(str(path), prove, theirs)
    )
    child.start()
    theirs.close()
    try:
        outcome = ours.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"{path}: its process ended with {child.exitcode}") from None
    child.join()
    if isinstance(outcome, HeteroError):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def table_row(result: dict[str, Any]) -> str:
    """Write one line of the table for people."""

    def number(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else format(value, form) + unit

    cells = (
        result["case"],
        str(result["gpus"]),
        number(result["score"], ".4f", f" {result['unit']}"),
        number(result["anchor"], ".4f"),
        number(result["ratio"], ".3f"),
        number(result["bound"], ".4f"),
        number(result["gap"] and 100 * result["gap"], ".1f"),
        number(result["search_s"], ".1f"),
        number(result["peak_memory_mib"], ".0f"),
        "yes" if result["fits"] else "NO",
    )
    return f"| {' | '.join(cells)} |"


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", type=Path, metavar="FILE", help="default: all")
    parser.add_argument(
        "--drawn", nargs="?", const="", metavar="HASH", help="cases that follow from a hash instead"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="cases whose name, up to a colon, is one of these"
    )
    parser.add_argument("--prove", action="store_true", help="bounds as of `plan --prove`")
    parser.add_argument("--json", action="store_true", help="a list of results, for programs")
    parser.add_argument("--layouts", action="store_true", help="print each plan below its result")
    options = parser.parse_args(arguments)
    results = []
    if not options.json:
        print("| case | GPUs | score | anchor | ratio | bound | gap % | search s | MiB | fits |")
        print("| --- | --: | --: | --: | --: | --: | --: | --: | --: | --- |")
    with tempfile.TemporaryDirectory() as folder:
        paths: Iterable[Path] = options.cases or sorted(CASES.glob("*.yaml"))
        if options.drawn is not None:
            paths = drawn_files(options.drawn or planner_commit(), Path(folder))
        for path in named(paths, options.only):
            try:
                result, layout = run_file(path, options.prove)
            except HeteroError as error:
                print(error, file=sys.stderr)
                return error.exit_code
            results.append(result)
            if not options.json:
                print(table_row(result), flush=True)
                if options.layouts:
                    print(f"  {layout}", flush=True)
    if options.json:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
