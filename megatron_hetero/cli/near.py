"""`plan --near OLD.JSON`: ways to go on with a plan on a cluster that changed."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.cli.arguments import with_sends
from megatron_hetero.cli.goal import objective_of
from megatron_hetero.cli.output import Output
from megatron_hetero.cli.summary import plan_summary
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.utilization import utilization_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import EXIT_INTERRUPTED, CheckFailedError, ModelError, UsageError
from megatron_hetero.flags.emit import check_user_flags, megatron_args
from megatron_hetero.flags.notes import plan_notes, refused_words, unknown_words, unread_parts
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.planner.restrictions.measured_sizes import profile_words
from megatron_hetero.planner.restrictions.mixture import with_mixed_precisions
from megatron_hetero.planner.restrictions.precision import with_precision
from megatron_hetero.report.text.refusals import note_lines, refusal_lines
from megatron_hetero.report.text.terminal import plan_report
from megatron_hetero.units import UnitError, parse_bandwidth

if TYPE_CHECKING:
    from megatron_hetero.planner.replan.replanning import Replanning

PREFERENCES = ("pays", "near", "best")


def add_near_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--near` and its arguments."""
    near = parser.add_argument_group(
        "planning again, after a node was lost, added or became slow",
        "The model is that of the old plan, unless --model is given.",
    )
    near.add_argument(
        "--near",
        type=Path,
        metavar="OLD.JSON",
        help="the plan that ran so far: shows the plan near it, the fastest one, what moving to "
        "each costs, and from how many steps on that pays",
    )
    near.add_argument(
        "--prefer",
        choices=PREFERENCES,
        default="pays",
        help="which of them to write: the one that ends first after --steps or --tokens that are "
        "left (default; the fastest if neither is known), the one that moves least, or the fastest",
    )
    near.add_argument(
        "--store-bandwidth",
        metavar="B",
        help='what a node reads of the checkpoint store, for example "2 GB/s": what is missing '
        "comes from there, not from the GPUs that have it",
    )


def check_near_arguments(arguments: argparse.Namespace) -> None:
    """Refuse arguments that go only with `--near` without the flag, and arguments excluded by the
    flag.

    Raises:
        UsageError: `--prefer` or `--store-bandwidth` without `--near`; what only a first plan
            has with it.
    """
    # Options of planning again mean nothing in a first plan.
    if arguments.near is None:
        for flag, given in (
            ("--store-bandwidth", arguments.store_bandwidth is not None),
            ("--prefer", arguments.prefer != "pays"),
        ):
            if given:
                raise UsageError(f"{flag} goes with --near OLD.JSON, the plan that ran so far")
        return
    for flag, given in (
        ("--prove", arguments.prove),
        ("--simplest", arguments.simplest is not None),
        ("--schedule best", arguments.schedule == "best"),
        ("--plugin-gain", arguments.plugin_gain is not None),
        (f"--objective {arguments.objective}", arguments.objective != "throughput"),
    ):
        if given:
            raise UsageError(f"{flag} does not go with --near yet: leave one of them away")


def _given_job(arguments: argparse.Namespace) -> Workload:
    """Read the job of `--model` and the flags behind `--`.

    Raises:
        ModelError: it is none; without `--model` the message says what the flags are.
    """
    more, environment = arguments.megatron_args, dict(arguments.model_env)
    try:
        return load_workload(arguments.model, more, environment=environment)
    except ModelError as error:
        if arguments.model is not None or not more:
            raise
        raise ModelError(
            "--near takes flags behind `--` without --model for a whole job, and does not add them "
            f"to the old plan's: give its script by --model too. {error}"
        ) from error


def run_near(
    arguments: argparse.Namespace, output: Output, cluster: Cluster, profile: Profile | None
) -> int:
    """Plan again, print the ways to go on, save the chosen one."""
    # Loaded here: a plan that is near no other needs none of it.
    from megatron_hetero.planner.replan.replanning import replan
    from megatron_hetero.report.text.changes.replanning import replanning_lines

    # The job is the old plan's, unless a model is given.
    old = load_plan(arguments.near)
    workload = old.workload
    if workload is None or arguments.model is not None or arguments.megatron_args:
        workload = _given_job(arguments)
        if old.workload is not None and workload.training.precision == "fp32":
            # The job names none: as it was chosen for the old plan.
            workload = with_precision(workload, old.workload.training.precision)
    # Sends and precisions of stages as in the old plan, unless the user says otherwise.
    of_old = None if old.workload is None else old.workload.training
    workload = with_sends(workload, arguments.sends or (None if of_old is None else of_old.sends))
    was_mixed = of_old is not None and of_old.mixes_precisions
    if arguments.stage_precision == "mixed" or was_mixed:
        workload = with_mixed_precisions(workload)
    check_user_flags(workload.megatron_args)
    # Search near the old plan, and among all plans.
    start_s = time.perf_counter()
    with output.search_progress() as progress:
        found = replan(
            old,
            cluster,
            workload,
            profile=profile,
            progress=progress,
            strategy=arguments.strategy,
            objective=objective_of(arguments, workload),
            store_bytes_per_s=_store_bytes_per_s(arguments.store_bandwidth),
            prefer=arguments.prefer,
        )
    search_s = time.perf_counter() - start_s
    # The flags are made here once, so that a contradiction is found now.
    plan = found.ways[found.chosen].plan
    megatron_args(plan, str(arguments.output or "plan.json"))
    if arguments.output:
        save_plan(plan, arguments.output)
    if found.interrupted:
        output.note("interrupted: these are the best plans found so far")
    # A plan that was saved, but whose job would not start, gives exit code 1.
    refused, unknown = refused_words(plan), unknown_words(unread_parts(plan))
    code = CheckFailedError.exit_code if refused or unknown else 0
    code = EXIT_INTERRUPTED if found.interrupted else code
    utilization = utilization_of(plan, cluster)
    doubts = (*profile_words(cluster, workload, profile), *map(str, cluster.doubts))
    if arguments.json:
        summary = plan_summary(plan, arguments.output, utilization)
        summary["search_s"] = round(search_s, 3)
        summary["ways"] = _ways_data(found)
        summary["chosen"] = found.chosen
        summary["interrupted"] = found.interrupted
        summary["notes"] = [*plan_notes(plan, workload), *doubts]
        output.json(summary)
        return code
    output.show(*replanning_lines(found, old), plan_report(plan, utilization), "")
    output.show(*doubts, *note_lines(plan, workload))
    name = f"number {found.chosen + 1} of the ways above"
    if arguments.output:
        output.show(
            f"Written to {arguments.output} ({name}); next: megatron-hetero flags "
            f"{shlex.quote(str(arguments.output))}, and start it with the --load of the old job"
        )
    else:
        output.show(f"Nothing was written ({name}): -o plan.json saves it")
    output.show(*refusal_lines(plan))
    return code


def _ways_data(found: Replanning) -> list[dict[str, Any]]:
    return [
        {
            "layout": way.layout,
            "step_time_s": way.step_time_s,
            "moved_bytes": round(way.movement.moved_bytes),
            "lost_bytes": round(way.movement.lost_bytes),
            "move_s": way.movement.time_s,
            "pays_after_steps": way.pays_after_steps,
        }
        for way in found.ways
    ]


def _store_bytes_per_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_bandwidth(text)
    except UnitError as error:
        raise UsageError(f"--store-bandwidth: {error}") from None
