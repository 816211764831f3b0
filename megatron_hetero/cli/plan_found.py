"""What `plan` says of the plan that it found: as JSON, or as text."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict, dataclass
from typing import Any

from megatron_hetero.bounds.estimate import may_be_proved_further
from megatron_hetero.cli.goal import asks_for_a_goal
from megatron_hetero.cli.output import Output
from megatron_hetero.cli.summary import plan_summary
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.utilization import utilization_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.flags.notes import plan_notes, refused_words
from megatron_hetero.model.load import load_arguments
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.explain import Explanation
from megatron_hetero.planner.faster_flags import faster_flags
from megatron_hetero.planner.stock_strategy import STOCK
from megatron_hetero.report.text.comparison import comparison_lines, refused_lines
from megatron_hetero.report.text.faster_flags import faster_flag_lines
from megatron_hetero.report.text.outcome import outcome_lines
from megatron_hetero.report.text.refusals import note_lines, refusal_lines
from megatron_hetero.report.text.terminal import plan_report
from megatron_hetero.schedule.stock import reasons_not_stock

_WIDE_GAP = 0.3


@dataclass(frozen=True)
class FoundPlan:
    """A plan, why it is good, and what it was made from.

    `cluster` and `profile`: with the sizes that the plan might use.  `search_s`: seconds of the
    search.  `chosen_precision`: why the search chose the precision; empty if the job names one.
    `said`: other sentences on the cluster and the profile.
    """

    plan: Plan
    explanation: Explanation
    workload: Workload
    cluster: Cluster
    profile: Profile | None
    search_s: float
    chosen_precision: str
    said: tuple[str, ...]


def found_summary(arguments: argparse.Namespace, found: FoundPlan) -> dict[str, Any]:
    """Return every figure for `--json`."""
    plan, explanation = found.plan, found.explanation
    summary = plan_summary(plan, arguments.output, utilization_of(plan, found.cluster))
    summary["search_s"] = round(found.search_s, 3)
    for name in ("best_stock", "stock_shortage", "outcome", "simplest", "fastest"):
        part = getattr(explanation, name)
        summary[name] = None if part is None else asdict(part)
    summary["by_hand"] = [asdict(other) for other in explanation.by_hand]
    summary["refused"] = [asdict(other) for other in explanation.refused]
    summary["simplest_within"] = explanation.simplest_within
    summary["objective"] = arguments.objective
    notes = plan_notes(plan, found.workload, _places(arguments))
    summary["notes"] = [*notes, *refused_lines(explanation), *found.said]
    summary["chosen_precision"] = found.chosen_precision or None
    summary["interrupted"] = explanation.interrupted
    faster = faster_flags(plan, found.cluster, found.profile)
    summary["faster_flags"] = [asdict(gain) for gain in faster]
    return summary


def show_found(arguments: argparse.Namespace, output: Output, found: FoundPlan) -> None:
    """Show the plan, and say what to do next."""
    plan, explanation, cluster = found.plan, found.explanation, found.cluster
    # Comparison with stock Megatron, the goal, and flags that would be faster.
    beside = comparison_lines(explanation, reasons_not_stock(plan), runners_up=False)
    outcome = explanation.outcome if asks_for_a_goal(arguments, cluster) else None
    outcome_part = [] if outcome is None else outcome_lines(outcome)
    faster = faster_flag_lines(faster_flags(plan, cluster, found.profile))
    lines = plan_report(plan, utilization_of(plan, cluster), in_full=False)
    chosen = [found.chosen_precision] if found.chosen_precision else []
    chosen_for_you = [*refused_lines(explanation), *chosen, *found.said]
    notes = note_lines(plan, found.workload, _places(arguments))
    output.show(lines, "", *chosen_for_you, *outcome_part, *beside, *notes, *faster)
    # A wide gap may be the plan's or the bound's.
    if _is_far_from_bound(arguments, plan):
        if arguments.strategy == "auto":
            output.show(
                "plan --strategy thorough takes up to ten times as long and may find a faster plan"
            )
        if may_be_proved_further(plan):
            output.show("plan --prove takes up to a minute more and may find a tighter lower bound")
    # Name the file written, and flags of the job that would stop its start.
    has_stock = explanation.best_stock is not None
    refusals = tuple(refusal_lines(plan, has_stock))
    # The last line says what to do next.
    if arguments.output is None:
        output.show("Nothing was written: -o plan.json saves the plan", *refusals)
    elif refused_words(plan, has_stock):
        output.show(f"Written to {arguments.output}, but its job would not start", *refusals)
    else:
        output.show(
            f"Written to {arguments.output}; next: "
            f"megatron-hetero flags {shlex.quote(str(arguments.output))}",
            *refusals,
        )


def _places(arguments: argparse.Namespace) -> dict[str, str]:
    """Return file and line of each flag of the job."""
    job = load_arguments(
        arguments.model, arguments.megatron_args, environment=dict(arguments.model_env)
    )
    return {argument.flag: argument.where for argument in job.arguments}


def _is_far_from_bound(arguments: argparse.Namespace, plan: Plan) -> bool:
    """Return True if the plan is so far from the bound that a longer search may pay."""
    gap = None if plan.estimates is None else plan.estimates.gap
    # Longer searches are advised for the default schedule, and where not only stock plans count.
    is_plain = arguments.schedule == "counts" and arguments.strategy != STOCK
    return gap is not None and gap > _WIDE_GAP and is_plain and not arguments.prove
