"""`megatron-hetero validate`: check every invariant of a plan, alone or against a cluster."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_hetero.cli.output import Output, error_object
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import FileFormatError, PlanFormatError
from megatron_hetero.flags.planned_sizes import own_flags_differ
from megatron_hetero.plan.checks.validate import is_made_for, validate_plan
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.of_plan import check_schedules
from megatron_hetero.schedule.proof.check import check_operations

DESCRIPTION = """\
Check a plan, for instance after editing it by hand: every layer on one stage,
every device used once, widths that divide the model, batches that add up.  With
--cluster also: the devices exist and are what the plan says, the plan keeps the
cluster's limits, and the memory suffices."""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `validate`."""
    parser.add_argument("plan", type=Path, metavar="PLAN.JSON", help="the plan")
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="CLUSTER.YAML",
        help="the machines: their names, memory and limits are checked too",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Validate; an invalid plan leaves through `FileFormatError` (exit code 4)."""
    try:
        # From cheap to dear: format, invariants, orders, operations, memory.
        plan = load_plan(arguments.plan)
        cluster = load_cluster(arguments.cluster) if arguments.cluster else None
        validate_plan(plan, cluster, str(arguments.plan))
        check_schedules(plan, str(arguments.plan))
        differing = own_flags_differ(plan, str(arguments.plan))
        if differing:
            raise PlanFormatError(
                f"{arguments.plan}: workload.megatron_args describe another job than "
                f"workload.model and workload.training: {'; '.join(differing)}. Change both, or "
                "plan again."
            )
        if plan.workload:
            check_operations(plan, plan.workload, source=str(arguments.plan))
        if cluster and plan.workload:
            # An edit may have outgrown a GPU, which the figures in the file cannot know.
            scored = replace(plan, estimates=estimate_plan(plan, cluster))
            validate_plan(scored, cluster, str(arguments.plan))
    except FileFormatError as error:
        if not arguments.json:
            raise
        output.error(str(error))
        found = error_object(type(error).__name__, str(error), error.exit_code)
        output.json({"valid": False, **found})
        return error.exit_code
    # A valid plan may still have figures of another cluster file.
    made_for_cluster = None if cluster is None else is_made_for(plan, cluster)
    if made_for_cluster is False:
        output.note(
            f"{arguments.cluster} was changed since {arguments.plan} was made, or is another one, "
            "so the plan's figures are old: `megatron-hetero explain --cluster` scores it anew"
        )
    if arguments.json:
        output.json(
            {
                "valid": True,
                "layout": format_layout(plan.layout),
                "num_devices": plan.layout.num_devices,
                "made_for_cluster": made_for_cluster,
            }
        )
        return 0
    against = f" on {arguments.cluster}" if cluster else ""
    output.show(f"{arguments.plan} is valid{against}: {format_layout(plan.layout)}")
    return 0
