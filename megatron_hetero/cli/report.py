"""`megatron-hetero report`: one HTML page about a plan, and its figures as SVG or PNG."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.errors import UsageError
from megatron_hetero.files import check_writable, make_folder, write_json, write_text
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import load_plan
from megatron_hetero.report.content import gather
from megatron_hetero.report.page.document import figures, page
from megatron_hetero.report.page.lanes import measured_lanes, rehearsed_lanes, trace_lanes
from megatron_hetero.report.picture import draw_png
from megatron_hetero.report.text.changes.replan import replan, replan_lines, replan_to_data
from megatron_hetero.schedule.simulator.trace import chrome_trace

DESCRIPTION = """\
Write one HTML page that explains a plan to someone who has not seen it: the
cluster with the plan on it, a step of training from begin to end, memory, where
the time goes, other plans beside it, what-if, and the commands to run it.  The
page needs no network.

  megatron-hetero report plan.json --cluster cluster.yaml -o plan.html"""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `report`."""
    parser.add_argument("plan", type=Path, metavar="PLAN.JSON", help="the plan")
    parser.add_argument(
        "--cluster", type=Path, required=True, metavar="CLUSTER.YAML", help="the machines"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="PROFILE.JSON", help="measurements to predict from"
    )
    parser.add_argument(
        "--rehearsal",
        type=Path,
        metavar="FILE",
        help="what `rehearse --json` printed: its timeline is drawn below the predicted one",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="what a training job wrote with --hetero-timeline: drawn below these",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compare with plans of stock Megatron alone; the default repeats the whole search",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE.HTML", help="the page to write")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="each figure as an SVG file")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FOLDER",
        help="each figure as a PNG file (needs Chromium or Chrome on this machine)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the timelines for ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Gather, draw, write."""
    if not (arguments.output or arguments.svg or arguments.png or arguments.trace):
        raise UsageError(
            "say what to write: -o PAGE.HTML, --svg FOLDER, --png FOLDER or --trace FILE"
        )
    # Gather the plan, its simulation, and measured or rehearsed timelines.
    plan = load_plan(arguments.plan)
    cluster = load_cluster(arguments.cluster)
    profile = load_profile(arguments.profile) if arguments.profile else None
    validate_plan(plan, cluster, str(arguments.plan))
    # Lanes of other timelines, drawn below the predicted one.
    others = [rehearsed_lanes(arguments.rehearsal, plan)] if arguments.rehearsal else []
    if arguments.measured:
        others.append(measured_lanes(arguments.measured, plan))
    if arguments.output:
        check_writable(arguments.output)
    with output.progress("comparing plans"):
        content = gather(plan, cluster, profile, others, str(arguments.plan), arguments.quick)
        # A measured timeline may show that another plan is better.
        again = replan(content, profile) if arguments.measured else None
    if again is not None:
        content = replace(content, notes=tuple(replan_lines(again)))
    # Write each file that was asked for.
    written: list[Path] = []
    if arguments.output:
        write_text(arguments.output, page(content))
        written.append(arguments.output)
    if arguments.trace:
        write_json(arguments.trace, chrome_trace(trace_lanes(content.timelines)))
        written.append(arguments.trace)
    for folder, suffix in ((arguments.svg, "svg"), (arguments.png, "png")):
        if folder is None:
            continue
        make_folder(folder)
        for figure in figures(content):
            path = folder / f"{figure.name}.{suffix}"
            if suffix == "svg":
                write_text(path, figure.standalone())
            else:
                draw_png(figure, path)
            written.append(path)
    if arguments.json:
        output.json(
            {
                "written": [str(path) for path in written],
                "step_time_s": content.explanation.step_time_s,
                "speedup_over_stock": content.speedup_over_stock,
                **({} if again is None else {"replan": replan_to_data(again)}),
            }
        )
    else:
        output.show(*(f"Written to {path}" for path in written))
        if again is not None:
            output.show(*replan_lines(again))
    return 0
