"""`megatron-hetero schedule`: other orders of computations for a plan, and what they save."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from rich import box
from rich.table import Table

from megatron_hetero.cli.output import Output
from megatron_hetero.cli.plan_on_cluster import add_plan_arguments, read_plan_on_cluster
from megatron_hetero.errors import CheckFailedError, PlanFormatError, UsageError
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import ScheduleName
from megatron_hetero.schedule.choice.choose import ScheduledPlan, candidates
from megatron_hetero.schedule.proof.check import check_operations
from megatron_hetero.units import format_duration

DESCRIPTION = """\
Make schedules for a plan: 1F1B with its launch counts, interleaved model chunks,
zero bubble (backward passes in two parts), and one computed for the unequal times
of its stages and hops.  All are simulated within the memory of the plan's GPUs;
with --kind the plan is written with the orders of one of them.

  megatron-hetero schedule plan.json --cluster cluster.yaml
  megatron-hetero schedule plan.json --cluster cluster.yaml --kind zero-bubble -o zb.json"""
TAKES_MEGATRON_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `schedule`."""
    add_plan_arguments(parser)
    parser.add_argument("--kind", choices=get_args(ScheduleName), help="the schedule to write")
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN.JSON", help="needs --kind")
    parser.add_argument(
        "--chunks", type=int, default=2, metavar="N", help="model chunks of interleaved stages"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Compare the schedules; write one."""
    # Without both there is nothing to write, or nowhere to.
    if (arguments.kind is None) != (arguments.output is None):
        raise UsageError("--kind and --output go together: which schedule, and where to write it")
    if arguments.chunks < 2:
        raise UsageError(f"--chunks {arguments.chunks}: interleaving takes 2 or more")
    found = read_plan_on_cluster(arguments)
    made = candidates(found.plan, found.cluster, found.profile, arguments.chunks, in_full=True)
    if arguments.output is not None:
        # The orders of the chosen schedule, if they fit into memory.
        chosen = next(c for c in made if c.name == arguments.kind)
        if chosen.plan is None:
            raise CheckFailedError(f"--kind {arguments.kind}: {chosen.held}")
        if chosen.plan.workload is not None:
            try:
                check_operations(chosen.plan, chosen.plan.workload)
            except PlanFormatError as error:
                raise CheckFailedError(f"--kind {arguments.kind}: {error}") from error
        save_plan(chosen.plan, arguments.output)
    if arguments.json:
        output.json({"schedules": [_data(candidate) for candidate in made]})
        return 0
    output.show(_table(made))
    output.show(
        "Pipeline time of the slowest replica as `simulate` has it, without gradient exchange and "
        "optimizer; "
        "relative: to the first line; under way: most passes (F to W) of each stage of replica 0."
    )
    if arguments.output is not None:
        output.show(f"Plan with {arguments.kind} orders written to {arguments.output}")
    return 0


def _data(candidate: ScheduledPlan) -> dict[str, object]:
    if candidate.plan is None:
        return {"kind": candidate.name, "unavailable": candidate.held}
    return {
        "kind": candidate.name,
        "launch_counts": candidate.has_launch_counts,
        "pipeline_times_s": list(candidate.pipeline_times_s),
        "peak_in_flight": [list(peaks) for peaks in candidate.peaks],
    }


def _title(candidate: ScheduledPlan) -> str:
    """Name a schedule: 1F1B whose stages launch more forwards before the first backward is not what
    papers mean."""
    return f"{candidate.name} + launch counts" if candidate.has_launch_counts else candidate.name


def _table(made: tuple[ScheduledPlan, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("schedule", "pipeline", "relative", "under way"):
        table.add_column(column, justify="left" if column in ("schedule", "under way") else "right")
    # Times are relative to the first schedule, 1F1B.
    first_s = made[0].slowest_s
    for candidate in made:
        if candidate.plan is None:
            table.add_row(candidate.name, "-", "-", candidate.held)
            continue
        table.add_row(
            _title(candidate),
            format_duration(candidate.slowest_s),
            f"{candidate.slowest_s / first_s:.3f}",
            ", ".join(map(str, candidate.peaks[0])),
        )
    return table
