"""`megatron-hetero flags`: a plan as Megatron arguments and `torchrun` lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_hetero.cli.arguments import add_master_port
from megatron_hetero.cli.output import Output
from megatron_hetero.flags.emit import megatron_args, render_bash
from megatron_hetero.flags.launch import (
    NodeLaunch,
    node_launches,
    rank_rows,
)
from megatron_hetero.flags.needed import missing_in_job, missing_line
from megatron_hetero.flags.notes import plan_notes
from megatron_hetero.flags.support.lookup import refused_options
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.report.text.ranks import rank_lines
from megatron_hetero.schedule.stock import reasons_not_stock

DESCRIPTION = """\
Print the commands that run a plan: Megatron's arguments, one torchrun line for
each machine, and the place of each process in the plan.  The output is a piece of bash;
nothing is started.  Where stock Megatron can express the plan, only its own
flags are printed.  Needs no torch."""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `flags`."""
    parser.add_argument("plan", type=Path, metavar="PLAN.JSON", help="the plan")
    parser.add_argument(
        "--style",
        choices=("bash", "line"),
        default="bash",
        help="bash: an array with one flag a line, and lines that use it; "
        "line: each machine's whole command on one line (default: bash)",
    )
    parser.add_argument(
        "--plan-path",
        metavar="PATH",
        help="where the machines will find the plan (default: PLAN.JSON as given)",
    )
    add_master_port(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the flags of a plan."""
    plan = load_plan(arguments.plan)
    # The machines may keep the plan at another path than this one.
    plan_path = arguments.plan_path or str(arguments.plan)
    argv = megatron_args(plan, plan_path)
    launches = node_launches(plan, plan_path, master_port=arguments.master_port)
    if arguments.json:
        output.json(_data(plan, argv, launches))
    elif arguments.style == "line":
        output.verbatim("\n".join(_commands(launches)))
    else:
        output.verbatim("\n".join(_script(plan, argv, launches)))
    return 0


def _data(plan: Plan, argv: tuple[str, ...], launches: tuple[NodeLaunch, ...]) -> dict[str, Any]:
    reasons = reasons_not_stock(plan)
    return {
        "argv": list(argv),
        "layout": format_layout(plan.layout),
        "stock_megatron": not reasons,
        "reasons_not_stock": list(reasons),
        "refused_flags": list(map(str, refused_options(plan))),
        "notes": list(plan_notes(plan)),
        "missing_flags": [needed.flags[0] for needed in missing_in_job(plan.workload)],
        "nodes": [
            {
                "node_rank": launch.node_rank,
                "host": launch.host,
                "environment": dict(launch.environment),
                "argv": list(launch.argv),
                "line": launch.line,
            }
            for launch in launches
        ],
        "ranks": [asdict(row) for row in rank_rows(plan)],
    }


def _script(plan: Plan, argv: tuple[str, ...], launches: tuple[NodeLaunch, ...]) -> Iterator[str]:
    """Write the output as bash; everything but commands is a comment."""
    # The layout, and whether stock Megatron runs the plan.
    yield comment(format_layout(plan.layout))
    reasons = reasons_not_stock(plan)
    if reasons:
        yield comment("Stock Megatron cannot run this plan; megatron-hetero is needed for")
        yield from (comment(f"  {reason}") for reason in reasons)
    else:
        yield comment("Stock Megatron runs this plan: these are its own flags, without plug-in.")
    # What stops the job comes before what is worth knowing.
    for option in refused_options(plan):
        yield comment(f"REFUSED at start-up on this plan, take it out: {option}")
    missing = missing_in_job(plan.workload)
    if missing:
        yield comment(f"MISSING, the job cannot start without: {missing_line(missing)}.")
        yield comment("  `megatron-hetero init --job` writes a script that has all of them.")
    for note in plan_notes(plan):
        yield comment(f"NOTE: {note}")
    if plan.workload is not None:
        yield comment(f"Model: {plan.workload.source}")
    yield ""
    # Megatron's arguments once, in an array that every line uses.
    yield render_bash(argv)
    yield ""
    # The plug-in reads the plan from a file; stock flags need none.
    if len(launches) > 1 and any(word.startswith("--hetero-plan") for word in argv):
        yield comment("--hetero-plan is read on every machine: copy the file to that path on each.")
    if len(launches) > 1:
        yield comment("One line for each machine; start them all.")
    # The lines without the arguments that are in the array.
    shared = tuple(NodeLaunch(n.node_rank, n.host, n.environment, _head(n, argv)) for n in launches)
    yield from _commands(shared, tail=' "${MEGATRON_ARGS[@]}"')
    yield ""
    yield comment("Which process is which part of the plan")
    yield from map(comment, rank_lines(rank_rows(plan)))


def comment(text: str) -> str:
    """Write a bash comment of a single line: a name from a plan file cannot begin a new line."""
    return "# " + "".join(c if c.isprintable() else "?" for c in text)


def _head(launch: NodeLaunch, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a node's command before the Megatron arguments."""
    return launch.argv[: len(launch.argv) - len(argv)]


def _commands(launches: tuple[NodeLaunch, ...], tail: str = "") -> Iterator[str]:
    for launch in launches:
        if launch.host is not None:
            yield comment(f"machine {launch.node_rank}, {launch.host}")
        yield launch.line + tail
