"""`plan --memory`: GPUs that would hold a model at all."""

from __future__ import annotations

import argparse

from rich import box
from rich.table import Table

from megatron_hetero.cli.output import Output
from megatron_hetero.cli.unread import MEGATRON_FLAGS
from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cost.memory.libraries import LEAST_MARGIN_BYTES, REMAINDER_BYTES
from megatron_hetero.cost.widths import usable_gpus
from megatron_hetero.errors import CheckFailedError, UsageError
from megatron_hetero.flags.emit import check_user_flags
from megatron_hetero.flags.notes import unknown_words, unread_lines, unread_of_job
from megatron_hetero.model.load import load_arguments, load_workload
from megatron_hetero.planner.advise.holding import (
    Holding,
    holdings,
    plan_that_fits,
)
from megatron_hetero.planner.advise.nothing_fits.relaxations import SERVER_GPUS
from megatron_hetero.report.text.words import GIB

_LENGTH = 4096
READS = ("memory", "cluster", "without", "model", "model_env", MEGATRON_FLAGS, "json")


def run_memory(arguments: argparse.Namespace, output: Output) -> int:
    """Print the table.

    Raises:
        UsageError: `--without` has no cluster to take machines from.
    """
    if arguments.without and arguments.cluster is None:
        raise UsageError("--without takes machines out of a cluster; give --cluster too")
    # GPU types of the cluster, or else the whole catalogue, and the job with assumed flags.
    limits, gpus = Limits(), [gpu_type(name) for name in gpu_type_names()]
    cluster = (
        None
        if arguments.cluster is None
        else load_cluster(arguments.cluster).without(arguments.without)
    )
    if cluster is not None:
        limits = cluster.limits
        used = [node.gpu_type for node in cluster.nodes if usable_gpus(cluster, node)]
        gpus = list({gpu.name: gpu for gpu in used}.values())
    assumed = _assumed(arguments)
    workload = load_workload(
        arguments.model,
        [*arguments.megatron_args, *assumed],
        environment=dict(arguments.model_env),
    )
    check_user_flags(workload.megatron_args)
    # The fewest GPUs of each type, and a plan of the cluster if one fits.
    found = holdings(workload, gpus, limits)
    known = {holding.gpu.name for holding in found}
    unable = [gpu.name for gpu in gpus if gpu.name not in known]
    own = None if cluster is None else plan_that_fits(cluster, workload)
    unread = unread_of_job(workload)
    notes, unknown = tuple(unread_lines(unread)), unknown_words(unread)
    code = CheckFailedError.exit_code if unknown else 0
    if assumed:
        notes = (f"assumed, as the job does not say: {' '.join(assumed)}", *notes)
    if arguments.json:
        data = {"gpus": [_data(holding) for holding in found], "cannot_train": unable}
        held = {"cluster_holds_it": own is not None, "layout": own}
        of_cluster = {} if cluster is None else held
        output.json({**data, **of_cluster, "notes": list(notes)})
        return code
    # Answer as a table, with what was assumed and what cannot train.
    training, kept = workload.training, limits.memory_reserve_bytes
    reserve = (
        f"{REMAINDER_BYTES / 1e9:g} GB of each GPU and its largest tensor "
        f"({LEAST_MARGIN_BYTES / 1e9:g} GB at least)"
        if kept is None
        else f"{kept / GIB:.3g} GiB of each GPU"
    )
    recompute = "no" if training.recompute == "none" else training.recompute
    output.show(
        f"The fewest GPUs of each type that hold {workload.source}, in one pipeline of equal "
        f"groups of up to {SERVER_GPUS} and {reserve} in reserve",
        _table(found),
        f"as given: with the job's --micro-batch-size {training.micro_batch_size} and "
        f"{recompute} recompute, which plans may change. "
        "More replicas take as many each, or less with --use-distributed-optimizer.",
    )
    for note in notes:
        output.note(note)
    if cluster is not None:
        answer = f"holds it, for example as {own}" if own else "does not, as far as was tried"
        what = "What is left" if arguments.without else "All"
        output.show(f"{what} of {arguments.cluster}: {answer}; `plan` without --memory says more")
    if unable:
        output.show(f"Cannot train in {training.precision}: {', '.join(unable)}")
    if unknown:
        output.show(unknown)
    return code


def _assumed(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags of batch and sequence that the job leaves out, with values to look at
    memory with: one sequence at a time, of the length that the model is made for up to 4096."""
    job = load_arguments(
        arguments.model, arguments.megatron_args, environment=dict(arguments.model_env)
    )
    given = {a.flag: a for a in job.arguments}
    words = given["--max-position-embeddings"].words if "--max-position-embeddings" in given else ()
    # The last occurrence holds; more than 11 digits are no length.
    most = words[-1] if words else ""
    length = min(int(most), _LENGTH) if most.isdecimal() and len(most) < 12 else _LENGTH
    values = {
        "--seq-length": str(length),
        "--micro-batch-size": "1",
        "--global-batch-size": given["--micro-batch-size"].words[-1]
        if "--micro-batch-size" in given and given["--micro-batch-size"].words
        else "1",
    }
    missing = [flag for flag in values if flag not in given]
    # Another name of the same length.
    if "--encoder-seq-length" in given and "--seq-length" in missing:
        missing.remove("--seq-length")
    # Megatron trains experts on a tensor-parallel group only so; at width 1 it does nothing.
    needs_it = "--num-experts" in given and "--sequence-parallel" not in given
    return (
        *(word for flag in missing for word in (flag, values[flag])),
        *(("--sequence-parallel",) if needs_it else ()),
    )


def _data(holding: Holding) -> dict[str, object]:
    return {
        "gpu": holding.gpu.name,
        "memory_bytes": holding.gpu.memory_bytes,
        "num_gpus": holding.num_gpus,
        "layout": None if holding.layout is None else str(holding.layout),
        "micro_batch_size": holding.micro_batch_size,
        "recompute": holding.recompute,
        "fullest": holding.fullest,
        "num_gpus_as_given": holding.num_gpus_as_given,
    }


def _table(found: tuple[Holding, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("GPU", no_wrap=True)
    for column in ("memory", "fewest", "as given"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("groups", no_wrap=True)
    table.add_column("recompute, micro-batch", no_wrap=True)
    table.add_column("fullest", justify="right", no_wrap=True)
    for holding in found:
        given = holding.num_gpus_as_given
        table.add_row(
            holding.gpu.name,
            f"{holding.gpu.memory_bytes / GIB:.1f} GiB",
            "none" if holding.num_gpus is None else str(holding.num_gpus),
            "none" if given is None else str(given),
            _groups(holding),
            f"{holding.recompute}, {holding.micro_batch_size}",
            "-" if holding.fullest is None else f"{holding.fullest:.0%}",
        )
    return table


def _groups(holding: Holding) -> str:
    """Write `4 x TP 8`: stages and their width."""
    if holding.layout is None:
        return "none fits"
    stages = holding.layout.replicas[0].stages
    return f"{len(stages)} x TP {stages[0].tensor_parallel}"
