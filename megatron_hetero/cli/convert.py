"""`megatron-hetero convert`: configurations of HexiScale and FlagScale, both ways."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from megatron_hetero.cli.arguments import check_new_folder
from megatron_hetero.cli.output import Output
from megatron_hetero.convert.as_plan import model_of, plan_of
from megatron_hetero.convert.flagscale import (
    cluster_of_meshes,
    cluster_text,
    from_flagscale,
    to_flagscale,
)
from megatron_hetero.convert.flagscale_job import FlagScaleJob, read_flagscale_job
from megatron_hetero.convert.given import Conversion, GivenFlags, read_flags
from megatron_hetero.convert.hexiscale import from_hexiscale, to_hexiscale
from megatron_hetero.errors import HeteroError, UsageError
from megatron_hetero.files import make_folder, write_text
from megatron_hetero.model.arguments import command_line_words, group_arguments
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import load_plan, save_plan

DESCRIPTION = """\
Read the parallel layout of another system's script (or flags after --) and print
it as a layout of ours, or write a plan; --to prints a plan of ours in the other
system's flags.  FlagScale's experiments (YAML) become a whole job with --folder:
the flags, a first cluster.yaml and the plan.  Files are read, never run.  What one
side cannot express is refused or named."""
TAKES_MEGATRON_FLAGS = True
SYSTEMS = ("hexiscale", "flagscale")
JOB_NAME, CLUSTER_NAME, PLAN_NAME = "pretrain.sh", "cluster.yaml", "plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `convert`."""
    parser.add_argument(
        "source",
        type=Path,
        nargs="?",
        metavar="SCRIPT",
        help="a script, or an experiment of FlagScale's (.yaml); a plan.json with --to",
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
        help="FlagScale's typed host file: print a first cluster.yaml instead, or with --folder "
        "write it there",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="write the job of a FlagScale experiment: pretrain.sh, cluster.yaml (links are to be "
        "filled in) and plan.json; a new folder",
    )
    parser.add_argument(
        "--model", type=Path, metavar="MODEL", help="the model, for -o (as for `plan`)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN.JSON", help="write a plan")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Convert in the direction that was asked for."""
    # A host file alone asks for a first cluster.yaml.
    if arguments.hostfile is not None and arguments.folder is None:
        _check_hostfile_alone(arguments)
        output.verbatim(cluster_text(arguments.hostfile).rstrip())
        return 0
    # From a plan of ours to the other system's flags.
    if arguments.target_system is not None:
        return _write(arguments, output)
    if arguments.source_system is None:
        raise UsageError("say --from or --to, and hexiscale or flagscale")
    # Flags behind `--` stand in for a script, or add to it.
    typed = tuple(arguments.megatron_args or ())
    source: Path | None = arguments.source
    is_yaml = source is not None and source.suffix in (".yaml", ".yml")
    # FlagScale's experiments are YAML, and describe whole jobs.
    if is_yaml and source is not None and arguments.source_system == "flagscale":
        return _experiment(arguments, source, typed, output)
    if arguments.folder is not None:
        raise UsageError("--folder: only an experiment of FlagScale's (.yaml) is a whole job")
    # A script: its flags give the layout, and with -o a plan.
    flags = read_flags(source, typed)
    read = from_hexiscale if arguments.source_system == "hexiscale" else from_flagscale
    conversion: Conversion = read(flags)
    plan = plan_of(conversion, model_of(arguments.model, typed))
    if arguments.output is not None:
        save_plan(plan, arguments.output)
    if arguments.json:
        output.json({"layout": conversion.layout, "notes": list(conversion.notes)})
        return 0
    _show(conversion, arguments.output, output)
    return 0


def _check_hostfile_alone(arguments: argparse.Namespace) -> None:
    """Refuse what a host file alone would leave unread; `--from flagscale` names its system."""
    unread = {
        "SCRIPT": arguments.source,
        "--from hexiscale": arguments.source_system == "hexiscale",
        f"--to {arguments.target_system}": arguments.target_system,
        "--model": arguments.model,
        "-o": arguments.output,
        "--json": arguments.json,
        "Megatron's flags": arguments.megatron_args,
    }
    _refuse_unread(
        unread,
        "--hostfile without --folder prints a first cluster.yaml",
        "or write the whole job of a FlagScale experiment with --folder",
    )


def _refuse_unread(unread: Mapping[str, object], what_is_done: str, otherwise: str) -> None:
    """Refuse the options that a direction would leave unread.

    Args:
        unread: name of each option -> its value, empty where it was not given.
        what_is_done: the direction, and its result.
        otherwise: what a user may do who wants the options.

    Raises:
        UsageError: some were given.
    """
    given = [name for name, value in unread.items() if value]
    if given:
        raise UsageError(
            f"{what_is_done}, and reads no {' and no '.join(given)}; leave that out, {otherwise}"
        )


def _experiment(
    arguments: argparse.Namespace, source: Path, typed: tuple[str, ...], output: Output
) -> int:
    """Convert an experiment of FlagScale's; write the parts that convert even where its layout does
    not."""
    folder: Path | None = arguments.folder
    # Overrides stand on the command line as FlagScale's own launcher takes them.
    job = read_flagscale_job(source, group_arguments(command_line_words(typed)))
    flags = GivenFlags(job.arguments)
    written: list[str] = []
    # The cluster and the job come first: both convert even where the layout does not.
    if folder is not None:
        check_new_folder(folder, f"--folder {folder}")
        # A typed host file names machines; without it the meshes of the experiment count GPUs.
        if arguments.hostfile is not None:
            cluster = cluster_text(arguments.hostfile)
        else:
            cluster = cluster_of_meshes(
                flags, job.device_types, job.gpus_per_node, f"{source.name} of FlagScale's"
            )
        make_folder(folder)
        write_text(folder / JOB_NAME, job.script)
        write_text(folder / CLUSTER_NAME, cluster)
        written += [JOB_NAME, CLUSTER_NAME]
    if not arguments.json:
        _show_left_out(job, output)
    # The layout; its error says what was written all the same.
    layout = ""
    try:
        conversion = from_flagscale(flags)
        layout = f"The layout is {conversion.layout}. "
        wants_plan = folder is not None or arguments.output is not None
        # The model of --model, or the experiment's own where a plan file needs one.
        workload = None
        if arguments.model is not None:
            workload = model_of(arguments.model, ())
        elif wants_plan:
            workload = load_workload(None, job.megatron_args)
        plan = plan_of(conversion, workload)
    except HeteroError as error:
        # Nothing was written, so the error says everything.
        if folder is None:
            raise
        raise type(error)(
            f"{error}\n{layout}Written to {folder}: {', '.join(written)}; no {PLAN_NAME}. With the "
            f"links filled in: megatron-hetero plan --cluster {folder / CLUSTER_NAME} --model "
            f"{folder / JOB_NAME}"
        ) from error
    # Save the plan, then answer.
    if folder is not None:
        save_plan(plan, folder / PLAN_NAME)
        written.append(PLAN_NAME)
    if arguments.output is not None:
        save_plan(plan, arguments.output)
    if arguments.json:
        left_out = [
            {"key": left.key, "where": left.where, "value": left.value, "why": left.why}
            for left in job.left_out
        ]
        data = {"layout": conversion.layout, "notes": list(conversion.notes)}
        output.json({**data, "left_out": left_out, "files": written})
        return 0
    _show(conversion, arguments.output, output)
    if folder is not None:
        output.note(
            f"written to {folder}: {', '.join(written)}; the links of {CLUSTER_NAME} are to be "
            "filled in"
        )
    return 0


def _show_left_out(job: FlagScaleJob, output: Output) -> None:
    """Show a note for each reason, with its keys; file names are relative to the source."""
    # Reason -> the keys that it holds for, with their places.
    places: dict[str, list[str]] = {}
    for left in job.left_out:
        where = left.where.removeprefix(f"{job.path.parent}/")
        places.setdefault(left.why, []).append(f"{left.key} ({where})")
    for why, keys in places.items():
        output.note(f"left out: {', '.join(keys)}: {why}")


def _show(conversion: Conversion, written: Path | None, output: Output) -> None:
    for note in conversion.notes:
        output.note(note)
    output.verbatim(conversion.layout)
    if written is not None:
        output.note(f"written to {written}, which names no machines")


def _write(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.source is None:
        raise UsageError(f"--to {arguments.target_system}: name the plan.json to convert")
    unread = {
        "--hostfile": arguments.hostfile,
        "--folder": arguments.folder,
        "--model": arguments.model,
        "-o": arguments.output,
        "Megatron's flags": arguments.megatron_args,
    }
    _refuse_unread(
        unread,
        f"--to {arguments.target_system} prints the flags of a plan",
        f"or say --from {arguments.target_system} to make a plan",
    )
    plan = load_plan(arguments.source)
    if arguments.target_system == "hexiscale":
        # HexiScale's flags have the micro-batch size, which a layout may leave out.
        size = plan.workload.training.micro_batch_size if plan.workload else None
        text = to_hexiscale(plan.layout, size)
    else:
        text = to_flagscale(plan.layout)
    if arguments.json:
        output.json({"flags": text})
    else:
        output.verbatim(text)
    return 0
