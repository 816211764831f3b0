"""The search without one of its parts at a time: what each is worth, in steps and in time.

    python tools/bench ablation --kept FOLDER [--only TEXT ...] [--large N] [--scale SIZE ...]
        [--drawn FIRST END] [--commit HASH] [--seq-length N] [--parts TEXT ...]
        [--together NAMES ...] [--json]

A part is a strategy, a move, or a habit of the search over structures; `--together "move cut + move
join"` leaves several out at once.  The jobs are those of `search`.  Each part is left out in a
process of its own, which plans all jobs one after the other, without the lower bound; plans are
simulated.  Steps and processor seconds are over those of the whole search, which is run first; a
part that pays has a step above 1.  Rows are kept in FOLDER and not made again: it is for one state
of the code.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from megatron_hetero.collector import no_collector
from megatron_hetero.errors import HeteroError, InfeasiblePlanError
from megatron_hetero.plan.file import save_plan
from megatron_hetero.planner import loop, structure_search
from megatron_hetero.planner.columns import choice_prices, equal_copies
from megatron_hetero.planner.evaluate import rescore
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.moves import neighbours
from megatron_hetero.planner.portfolio import (
    default_strategies,
    search,
)
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds import starts
from megatron_hetero.planner.strategy import Strategy
from megatron_hetero.planner.structure_search import Phases, StructureSearch
from tools.bench.alone import alone
from tools.bench.search.search import JOB_OPTIONS, all_jobs, step_of
from tools.bench.show import Columns, is_chosen, option

WHOLE = "the whole search"
_AND = " + "
Strategies = list[Strategy]
LeaveOut = Callable[[Strategies], Strategies]
"""Changes the program of this process and returns the strategies that are left."""


def without_strategy(name: str) -> LeaveOut:
    """Leave out the strategies of a class."""
    return lambda given: [one for one in given if type(one).__name__ != name]


def without_move(name: str) -> LeaveOut:
    """Leave a move out of every table that has it."""

    def leave_out(given: Strategies) -> Strategies:
        for table in ("IN_ONE", "IN_TWO", "WITH_IDLE", "DIVIDED"):
            moves = getattr(neighbours, table)
            setattr(neighbours, table, tuple(m for m in moves if m.__name__ != name))
        return given

    return leave_out


def changed(owner: Any, name: str, value: Any) -> LeaveOut:
    """Put another value in the place of an attribute."""

    def leave_out(given: Strategies) -> Strategies:
        if not hasattr(owner, name):
            raise AttributeError(f"{owner} has no {name}: the part is not left out")
        setattr(owner, name, value)
        return given

    return leave_out


def together(*parts: LeaveOut) -> LeaveOut:
    """Leave several out at once."""
    return lambda given: reduce(lambda left, leave_out: leave_out(left), parts, given)


def with_limits(**limits: Any) -> LeaveOut:
    """Give the search over structures other limits."""

    def leave_out(given: Strategies) -> Strategies:
        for one in given:
            if isinstance(one, StructureSearch):
                one.limits = replace(one.limits, **limits)
        return given

    return leave_out


def parts() -> Mapping[str, LeaveOut]:
    """Return what leaves each part out, by its name."""
    names = [type(strategy).__name__ for strategy in default_strategies()]
    found = {f"strategy {name}": without_strategy(name) for name in dict.fromkeys(names)}
    tables = neighbours.IN_ONE, neighbours.IN_TWO, neighbours.WITH_IDLE, neighbours.DIVIDED
    found |= {f"move {m.__name__}": without_move(m.__name__) for table in tables for m in table}
    found["move begin"] = changed(neighbours, "begin", lambda *_: iter(()))
    found["moves of all replicas that are alike"] = changed(
        neighbours, "_in_each", _first_scope_only(neighbours._in_each)
    )
    found["moves of all pairs that are alike"] = changed(
        neighbours, "_in_pairs", _first_scope_only(neighbours._in_pairs)
    )
    found |= {
        "tuning": changed(Rungs, "tune", _as_tuned),
        "thorough tuning at the end": changed(structure_search, "THOROUGH", 0),
        "simulation of queues": changed(Rungs, "queued", _as_simulated),
        "a second micro-batch size": changed(Rungs, "sizes", _first_size(Rungs.sizes)),
        "bundles for equal copies": changed(equal_copies, "equal_shapes", lambda *_: []),
        "estimates of divisions that learn": changed(
            choice_prices.ChoicePrices, "soonest", lambda self, choices: 0
        ),
        "starts laid lengthwise": changed(starts, "lengthwise", lambda structure, _: structure),
        "descents from single starts": changed(Phases, "narrowed", _all_together),
        "all starts but one": with_limits(num_starts=1),
        "divided sequences": changed(Phases, "divide", lambda _: None),
        "launches further ahead at the end": changed(rescore, "_MORE_AHEAD", ()),
        "unlike micro-batch sizes": changed(structure_search, "may_mix_sizes", lambda _: False),
        "optimizer states by room": together(
            changed(structure_search, "by_room", lambda *_: None),
            changed(loop, "by_room", lambda *_: None),
        ),
        "stages joined in unlike shares": changed(Phases, "join", lambda _: None),
    }
    return found


def _first_scope_only(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda structure, scopes, change: make(structure, scopes[:1], change)


def _first_size(sizes: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, structure: sizes(self, structure)[:1]


def _all_together(_: Any, starts: Any) -> Any:
    return [one for start in starts for one in start]


def _as_tuned(_: Any, node: Any, before: Any, max_work: int = 0) -> Any:
    return replace(node, tuned=True)


def _as_simulated(self: Any, node: Any, candidate: Any) -> Any:
    self.best_s = min(self.best_s, node.time_s)
    return replace(node, queued=True)


def run_without(part: str, folder: Path, options: argparse.Namespace) -> None:
    """Write one part's steps and seconds of every job, in a process of its own."""
    path = folder / f"{part}.json"
    if path.exists():
        return
    found, names = parts(), [] if part == WHOLE else part.split(_AND)
    rows = {}
    strategies = together(*[found[name] for name in names])(list(default_strategies()))
    for job in all_jobs(options, folder):
        cluster, workload = job.load()
        started = time.process_time()
        try:
            with no_collector():
                problem = make_problem(cluster, workload)
                best = Rescorer(search(problem, strategies=strategies)).best()
            if best is None:
                raise InfeasiblePlanError(f"{job.name}: nothing fits")
            seconds = time.process_time() - started
            save_plan(bare_plan(problem, best, {}), folder / "plan.json")
            rows[job.name] = step_of(job, folder / "plan.json")[0], seconds
        except HeteroError:
            rows[job.name] = math.inf, time.process_time() - started
        print(f"  {part}: {job.name}: {rows[job.name][0]:.4f} s", file=sys.stderr, flush=True)
    path.write_text(json.dumps(rows))


def summary(part: str, folder: Path) -> dict[str, Any]:
    """Return one row of the table."""
    whole = json.loads((folder / f"{WHOLE}.json").read_text())
    own = json.loads((folder / f"{part}.json").read_text())
    # Of drawn jobs some fit nowhere.
    fitting = [job for job in whole if whole[job][0] < math.inf]
    steps = {job: own[job][0] / whole[job][0] for job in fitting}
    worst = max(steps, key=lambda job: steps[job])
    seconds = [own[job][1] / whole[job][1] for job in fitting]
    return {
        "without": part,
        "jobs": len(steps),
        "step": statistics.geometric_mean(steps.values()),
        "longer": sum(ratio > 1.0005 for ratio in steps.values()),
        "shorter": sum(ratio < 0.9995 for ratio in steps.values()),
        "worst": steps[worst],
        "worst_job": worst,
        "search": statistics.geometric_mean(seconds),
    }


COLUMNS = Columns({
    "without": "{without}", "jobs": "{jobs}", "step, geometric mean": "{step:.4f}",
    "longer steps": "{longer}", "shorter": "{shorter}",
    "the worst": lambda row: (
        f"{row['worst']:.4f} ({row['worst_job']})" if row["worst"] > 1.0005 else "-"
    ),
    "processor time": "{search:.2f}",
})  # fmt: skip


OPTIONS = (
    option("--kept", type=Path, required=True, metavar="FOLDER"),
    *JOB_OPTIONS,
    option("--parts", nargs="+", metavar="TEXT", help="parts with this in their name"),
    option("--together", nargs="+", metavar="NAMES", help=f"parts at once, with{_AND}between"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Plan all jobs without each part, in a process of its own."""
    known, groups = list(parts()), given.together or []
    if unknown := {name for group in groups for name in group.split(_AND)}.difference(known):
        raise SystemExit(f"--together: no parts {sorted(unknown)}; there are {', '.join(known)}")
    given.kept.mkdir(parents=True, exist_ok=True)
    yield COLUMNS
    alone(run_without, WHOLE, given.kept, given)
    # With groups alone no single part is left out.
    singles = [name for name in known if is_chosen(name, given.parts)]
    for part in [*(singles if given.parts or not groups else ()), *groups]:
        alone(run_without, part, given.kept, given)
        yield summary(part, given.kept)
