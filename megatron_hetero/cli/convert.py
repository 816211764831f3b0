"""`megatron-hetero convert`: configurations of HexiScale and FlagScale, both ways."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.convert.flagscale import cluster_text, from_flagscale, to_flagscale
from megatron_hetero.convert.given import Conversion, read_flags
from megatron_hetero.convert.hexiscale import from_hexiscale, to_hexiscale
from megatron_hetero.errors import UsageError
from megatron_hetero.flags.table import flag_table
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.plan.layout import parse_layout

DESCRIPTION = """\
Read the parallel layout of another system's script (or flags after --) and print
it as a layout of ours, or write a plan; --to prints a plan of ours in the other
system's flags.  The script is read, never run.  What one side cannot express is
refused by name."""
TAKES_MEGATRON_FLAGS = True
SYSTEMS = ("hexiscale", "flagscale")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `convert`."""
    parser.add_argument(
        "source", type=Path, nargs="?", metavar="SCRIPT", help="a script; a plan.json with --to"
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--from", dest="source_system", choices=SYSTEMS, help="the system that SCRIPT is for"
    )
    direction.add_argument(
        "--to", dest="target_system", choices=SYSTEMS, help="the system to print flags for"
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="FlagScale's typed host file: print a first cluster.yaml instead",
    )
    parser.add_argument(
        "--model", type=Path, metavar="MODEL", help="the model, for -o (as for `plan`)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN.JSON", help="write a plan")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Convert in the direction that was asked for."""
    if arguments.hostfile is not None:
        output.verbatim(cluster_text(arguments.hostfile).rstrip())
        return 0
    if arguments.target_system is not None:
        return _write(arguments, output)
    if arguments.source_system is None:
        raise UsageError("say --from or --to, and hexiscale or flagscale")
    flags = read_flags(arguments.source, arguments.megatron_args or ())
    read = from_hexiscale if arguments.source_system == "hexiscale" else from_flagscale
    conversion: Conversion = read(flags)
    workload = None
    if arguments.model:
        workload = load_workload(
            arguments.model, _flags_of_the_model(arguments.megatron_args or ())
        )
    if workload is not None:
        # The model's script is often the other system's own, whose flags Megatron does not know.
        known = flag_table().known_part(workload.megatron_args)
        workload = replace(workload, megatron_args=known)
    plan = plan_from_layout(parse_layout(conversion.layout), workload)
    if arguments.output is not None:
        save_plan(plan, arguments.output)
    if arguments.json:
        output.json({"layout": conversion.layout, "notes": list(conversion.notes)})
        return 0
    for note in conversion.notes:
        output.note(note)
    output.verbatim(conversion.layout)
    if arguments.output is not None:
        output.note(f"written to {arguments.output}, which names no machines")
    return 0


def _flags_of_the_model(typed: Sequence[str]) -> tuple[str, ...]:
    """What was typed behind `--` beside the layout: Megatron's flags that describe the model."""
    kept: list[str] = []
    taken = False
    for word in flag_table().known_part(tuple(typed)):
        if word.startswith("--"):
            taken = "parallel" not in word and "hetero" not in word
        if taken:
            kept.append(word)
    return tuple(kept)


def _write(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.source is None:
        raise UsageError(f"--to {arguments.target_system}: name the plan.json to convert")
    plan = load_plan(arguments.source)
    if arguments.target_system == "hexiscale":
        size = plan.workload.training.micro_batch_size if plan.workload else None
        text = to_hexiscale(plan.layout, size)
    else:
        text = to_flagscale(plan.layout)
    if arguments.json:
        output.json({"flags": text})
    else:
        output.verbatim(text)
    return 0
