"""`megatron-hetero explain`: a plan file in words; with its cluster, scored and explained anew."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.cli.summary import plan_summary
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.sync.communicators import RankCommunicators, by_rank
from megatron_hetero.cost.utilization import utilization_of
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.errors import UsageError
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import load_plan
from megatron_hetero.planner.advise.explain import explain_plan
from megatron_hetero.planner.advise.what_if import WhatToAdd, what_to_add
from megatron_hetero.report.text.changes.additions import what_if_lines
from megatron_hetero.report.text.communicators import communicator_lines
from megatron_hetero.report.text.explanation import explanation_report
from megatron_hetero.report.text.terminal import plan_report
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.stock import is_stock, reasons_not_stock

DESCRIPTION = """\
Show a plan: its replicas and stages, memory, predicted speed, the GPUs it leaves
idle and why.  With --cluster the plan is scored anew, so that one edited by hand
gets fresh figures, and explained: where the time goes, which stage sets the pace,
how it compares with stock Megatron's best plan and with the next best ones.
--what-if says which node or link to add first, and what it would bring."""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `explain`."""
    parser.add_argument("plan", type=Path, metavar="PLAN.JSON", help="the plan")
    parser.add_argument(
        "--cluster", type=Path, metavar="CLUSTER.YAML", help="the machines, to score the plan anew"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="PROFILE.JSON",
        help="measurements to score with (needs --cluster)",
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also plan for the cluster with one thing more (a node of each GPU type, each class "
        "of links twice as fast): what to add first (needs --cluster)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the plan and, with a cluster, the reasons for its shape."""
    # Scoring needs the cluster that the scores are of.
    if arguments.profile and not arguments.cluster:
        raise UsageError("--profile scores the plan on a cluster; give --cluster too")
    if arguments.what_if and not arguments.cluster:
        raise UsageError("--what-if adds to a cluster; give --cluster too")
    # Without a cluster only what the file says.
    plan = load_plan(arguments.plan)
    explanation = utilization = None
    what_if: WhatToAdd | None = None
    if arguments.cluster:
        cluster = load_cluster(arguments.cluster)
        profile = load_profile(arguments.profile) if arguments.profile else None
        # The file's figures are of another moment; a plan that does not fit is shown as such.
        plan = replace(plan, estimates=None)
        validate_plan(plan, cluster, str(arguments.plan))
        plan = replace(plan, estimates=estimate_plan(plan, cluster, profile))
        explanation = explain_plan(plan, cluster, profile)
        utilization = utilization_of(plan, cluster, explanation.step_time_s)
        if arguments.what_if:
            with output.progress("planning with what could be added") as say:
                what_if = what_to_add(plan, cluster, profile, say=say)
    # Communicators are of our runtime; stock Megatron makes its own.
    communicators: tuple[RankCommunicators, ...] = ()
    if plan.workload is not None and not is_stock(plan):
        communicators = by_rank(plan, plan.workload)
    # The same in JSON.
    if arguments.json:
        data = plan_summary(plan, arguments.plan, utilization)
        data["scored_anew"] = explanation is not None
        data["explanation"] = None if explanation is None else asdict(explanation)
        data["communicators"] = [
            {**asdict(rank), "nccl_bytes_per_channel": rank.bytes_per_channel}
            for rank in communicators
        ]
        if what_if is not None:
            data["what_if"] = [asdict(addition) for addition in what_if.additions]
            data["what_if_from_s"] = what_if.step_time_s
        output.json(data)
        return 0
    # In words: the plan, its reasons, its communicators, what could be added.
    output.show(plan_report(plan, utilization))
    # Figures of the file are shown with their origin.
    if explanation is None and plan.estimates is not None:
        output.show(
            f"Times, memory and bound are those that {arguments.plan} holds, of the plan as it was "
            f"written by {plan.made_by or 'its maker'}. After an edit they are old: add --cluster "
            "CLUSTER.YAML to score it anew"
        )
    if explanation is not None:
        output.show("", explanation_report(explanation, reasons_not_stock(plan)))
    if communicators:
        output.show(*communicator_lines(plan, communicators))
    if what_if is not None and what_if.additions and explanation is not None:
        output.show(*what_if_lines(what_if, explanation.step_time_s))
    return 0
