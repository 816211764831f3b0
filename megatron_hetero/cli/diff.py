"""`megatron-hetero diff`: differences between two plans, in words."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.plan.diff import diff_plans
from megatron_hetero.plan.file import load_plan
from megatron_hetero.report.text.changes.differences import difference_table, folded
from megatron_hetero.report.text.words import count

DESCRIPTION = """\
Show how two plans differ: the step time first, then replicas, stages, layers,
micro-batches, settings, and which GPUs moved; rows that are alike are folded.
The exit code is 0 whether they differ or not."""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `diff`."""
    parser.add_argument("before", type=Path, metavar="A.JSON", help="one plan")
    parser.add_argument("after", type=Path, metavar="B.JSON", help="the other")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Compare two plan files."""
    differences = diff_plans(load_plan(arguments.before), load_plan(arguments.after))
    if arguments.json:
        output.json({"differences": [asdict(d) for d in differences]})
        return 0
    if not differences:
        output.show("the plans are equal")
        return 0
    # Like differences of many stages or GPUs share a row.
    rows = folded(differences)
    lines = count(len(differences), "difference")
    if len(rows) < len(differences):
        lines += f", like ones in one row (all of them: --json): {len(rows)} rows"
    output.show(difference_table(rows), lines)
    return 0
