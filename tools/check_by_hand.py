"""A plan's figures beside those of a sheet of paper: FLOPs, bytes, lines, memory, times.

    megatron-hetero simulate plan.json --cluster C.yaml --json > simulated.json
    python tools/check_by_hand.py plan.json --cluster C.yaml --simulated simulated.json \\
        [--outcome outcome.json] [--json]

Imports nothing of megatron_hetero: `tools/by_hand` reads plan.json and cluster.yaml by itself and
has data sheets and formulas of its own.  Exits with 1 where a figure is further from its own than
allowed, where a line would carry more than it can in the step, or where the plan does something
that has no formula here (which is said).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.by_hand.memory import device_bytes, model_flops  # noqa: E402
from tools.by_hand.paper import NotByHandError, Paper, read_plan  # noqa: E402
from tools.by_hand.site import Site  # noqa: E402
from tools.by_hand.step import StepByHand, exchange_seconds, step_by_hand  # noqa: E402
from tools.by_hand.traffic import boundary_bytes, exchanges, loads  # noqa: E402

ALLOWED = {"FLOPs": 0.02, "bytes": 0.02, "load": 0.02, "memory": 0.05, "step": 0.10}
DOMINATES = 0.75
"""One stage dominates a step if it computes in three quarters of it, if round trips of
micro-batches do not make the pipeline longer, and if boundaries take no path or line for longer
than three quarters of the stage's time.

Of round trips the paper has the least that they take; a message that waits for another makes a trip
longer.  The last condition is needed as the first is: a line that carries messages for as long as
the slowest stage computes is a second bottleneck, and no stage dominates.  Its messages come in
bursts and wait for each other, so that the step is longer than either needs; by how much depends on
the order of all passes, which the sheet of paper has no formula for.  Where the line has a quarter
of that time to spare, waiting on it delays the slowest stage little.  Of `benchmarks/invented`,
`forty-nodes` alone has such a line, busy for three quarters of its step, which is all of the time
that the slowest stage computes; lines of the others are busy for at most 55 % of their steps.

Such a step is shown beside the paper's and not judged by the 10 %.  What it is made of is: FLOPs,
bytes, loads, memory and each stage's time, and it may be no shorter than its slowest stage."""


@dataclass(frozen=True)
class Row:
    """A figure of the program beside that of the sheet of paper.

    `allowed` is None where it is shown only, and `why` says the reason.
    """

    kind: str
    what: str
    program: float | None
    by_hand: float | None
    allowed: float | None
    why: str = ""

    @property
    def apart(self) -> float | None:
        """Return the distance of the program from the paper, as a part of the paper's figure."""
        if self.program is None or self.by_hand is None:
            return None
        if self.by_hand == 0:
            return 0.0 if self.program == 0 else float("inf")
        return self.program / self.by_hand - 1

    @property
    def is_wrong(self) -> bool:
        """Return whether it is outside of what is allowed."""
        if self.allowed is None:
            return False
        return self.apart is None or abs(self.apart) > self.allowed


def compared(plan: dict[str, Any], site: Site, simulated: dict[str, Any]) -> Iterator[Row]:
    """Yield all figures.

    Args:
        simulated: what `simulate --json` prints.
    Raises:
        NotByHandError: something has no formula here.
    """
    paper = read_plan(plan)
    is_stock = simulated["sends"] != "buffered"
    flops = simulated["utilization"]["model_flops"]
    yield Row(
        "FLOPs", "of the model in a step", flops, model_flops(paper.job, paper.rows),
        None if flops is None else ALLOWED["FLOPs"], "" if flops else "the program prints none",
    )  # fmt: skip
    yield from _lines(paper, site, simulated, is_stock)
    for r, replica in enumerate(paper.replicas):
        for s, stage in enumerate(replica.stages):
            for member, device in enumerate(stage.devices):
                own = plan["estimates"]["devices"][device]["peak_bytes"]
                found = device_bytes(paper, site, replica, s, member)
                what = f"{device}, replica {r} stage {s}"
                yield Row("memory", what, own, found, ALLOWED["memory"])
    yield from _times(plan, paper, site, is_stock)


def _lines(paper: Paper, site: Site, simulated: dict[str, Any], is_stock: bool) -> Iterator[Row]:
    step_s = simulated["step_time_s"]
    ours = {k["name"]: k for k in simulated["links"] if not k["name"].endswith((" in", " out"))}
    ours |= {k["name"]: k for k in simulated["links"] if k["name"].startswith("uplink ")}
    found = loads(
        site, boundary_bytes(paper, is_stock), *(e for _, e in exchanges(paper, is_stock))
    )
    for name in sorted(ours.keys() | found.keys()):
        size, seconds = found.get(name, (0.0, 0.0))
        if name not in ours and " -> " in name and _leads_over_lines(site, name):
            continue  # the simulation counts it on the lines alone, which are no faster
        link = ours.get(name, {"num_bytes": 0.0, "busy_s": 0.0})
        yield Row("bytes", name, link["num_bytes"], size, ALLOWED["bytes"])
        load = link["busy_s"] / step_s
        yield Row("load", name, load, seconds / step_s, ALLOWED["load"])
        if max(load, seconds / step_s) > 1:
            yield Row("load", f"{name} carries more than it can", load, 1.0, 0.0)


def _leads_over_lines(site: Site, name: str) -> bool:
    here, there = name.split(" -> ")
    return here in site.nodes and bool(site.between(here, there).lines)


def _times(plan: dict[str, Any], paper: Paper, site: Site, is_stock: bool) -> Iterator[Row]:
    estimates = plan["estimates"]
    step = step_by_hand(paper, site, exchange_seconds(paper, site, is_stock))
    for r, (own, found) in enumerate(zip(estimates["stage_times_s"], step.stages_s, strict=True)):
        for s, (ours, by_hand) in enumerate(zip(own, found, strict=True)):
            yield Row("stage", f"replica {r} stage {s}", ours, by_hand, ALLOWED["step"])
    why = _what_else(paper, site, step, is_stock)
    allowed = None if why else ALLOWED["step"]
    step_s = estimates["step_time_s"]
    yield Row("step", "seconds", step_s, step.step_s, allowed, why)
    if step_s < (1 - ALLOWED["step"]) * step.slowest_s:
        yield Row("step", "shorter than its slowest stage", step_s, step.slowest_s, 0.0)


def _what_else(paper: Paper, site: Site, step: StepByHand, is_stock: bool) -> str:
    """Explain why no stage dominates the step; empty where one does."""
    part = step.slowest_s / step.step_s
    if part < DOMINATES:
        return f"no stage dominates: the slowest computes in {part:.0%} of it"
    if step.is_of_trips:
        return f"no stage dominates: round trips of micro-batches take {step.pipelines_s:.3g} s"
    carried = loads(site, boundary_bytes(paper, is_stock))
    for name, (_, seconds) in carried.items():
        if seconds > DOMINATES * step.slowest_s:
            return (
                f"no stage dominates: the slowest computes for {step.slowest_s:.3g} s, "
                f"boundaries take {name} for {seconds:.3g} s"
            )
    return ""


def worst(rows: list[Row], kind: str) -> Row | None:
    """Find the row of a kind that is furthest from the paper."""
    found = [row for row in rows if row.kind == kind]
    return max(found, key=lambda row: abs(row.apart or 0.0), default=None)


def printed(rows: list[Row], shows_all: bool) -> Iterator[str]:
    """Write the table: of each kind the row that is furthest off, and all that are wrong."""
    yield f"{'':7} {'':40} {'program':>12} {'by hand':>12} {'apart':>8} {'allowed':>8}"
    kinds = dict.fromkeys(row.kind for row in rows)
    for row in rows:
        if shows_all or row.is_wrong or row in [worst(rows, kind) for kind in kinds]:
            apart = "" if row.apart is None else f"{row.apart:+8.2%}"
            allowed = "shown" if row.allowed is None else f"{row.allowed:.0%}"
            program = "none" if row.program is None else f"{row.program:.5g}"
            end = "  WRONG" if row.is_wrong else f"  {row.why}" if row.why else ""
            yield (
                f"{row.kind:7} {row.what:40} {program:>12} {row.by_hand:12.5g} "
                f"{apart:>8} {allowed:>8}{end}"
            )
    counts = ", ".join(f"{sum(r.kind == kind for r in rows)} {kind}" for kind in kinds)
    yield f"{counts} compared; {sum(row.is_wrong for row in rows)} wrong"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--cluster", type=Path, required=True)
    parser.add_argument("--simulated", type=Path, required=True)
    parser.add_argument("--all", action="store_true", help="print every figure")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    given = parser.parse_args(argv)
    plan, simulated = (json.loads(path.read_text()) for path in (given.plan, given.simulated))
    try:
        rows = list(compared(plan, Site(given.cluster), simulated))
    except NotByHandError as error:
        print(f"cannot be checked by hand: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps([{**asdict(row), "apart": row.apart} for row in rows], indent=1))
    else:
        print("\n".join(printed(rows, given.all)))
    return 1 if any(row.is_wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
