"""`megatron-hetero rehearse`: run a plan for real on this machine, as slowly as its GPUs would.

`megatron_hetero.lab.rehearse` does the work; `report.text.trials.rehearsal` puts it in words.
"""

from __future__ import annotations

import argparse
import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_hetero.cli.arguments import at_least_one, number
from megatron_hetero.cli.output import Output
from megatron_hetero.cli.plan_on_cluster import (
    PlanOnCluster,
    add_plan_arguments,
    read_plan_on_cluster,
)
from megatron_hetero.cli.verify import require_runtime
from megatron_hetero.errors import UsageError
from megatron_hetero.files import check_writable, write_json
from megatron_hetero.planner import plan_and_explain
from megatron_hetero.report.text.trials.rehearsal import rehearsal_report
from megatron_hetero.schedule.simulator.trace import chrome_trace

DESCRIPTION = """\
Run a plan for real on this machine's CPU: one process for each GPU, Megatron's own
training, real messages.  The model is shrunk; each process computes as long as its
GPU would, each link carries as much as described, all slowed down alike.  Ends with
the predicted beside the rehearsed step.  Exit code 0: they agree; 1: they do not.

  megatron-hetero rehearse plan.json --cluster cluster.yaml --trace both.json
  megatron-hetero rehearse plan.json --cluster cluster.yaml --slow-rank 2:1.5
  megatron-hetero rehearse --cluster cluster.yaml --sequences lengths.txt --model job.flags"""
TAKES_MEGATRON_FLAGS = True
LIMIT = 0.08


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rehearse`."""
    add_plan_arguments(parser, needs_plan=False)
    parser.add_argument(
        "--sequences",
        type=Path,
        metavar="LENGTHS.TXT",
        help="rehearse --hetero-sequences flexible on documents of these lengths (as `plan` has "
        "them), on the plan or, without one, on every GPU by itself",
    )
    parser.add_argument(
        "--steps", type=at_least_one, default=3, metavar="N", help="steps to time (default: 3)"
    )
    parser.add_argument(
        "--time-scale",
        type=_positive,
        metavar="S",
        help="seconds here for each second of the cluster (default: what this machine needs)",
    )
    parser.add_argument(
        "--limit",
        type=_positive,
        default=LIMIT,
        metavar="PART",
        help=f"largest error of the predicted step time (default: {LIMIT})",
    )
    parser.add_argument(
        "--slow-rank",
        action="append",
        default=[],
        metavar="RANK:FACTOR",
        help="this rank computes FACTOR times as long as predicted (repeatable)",
    )
    parser.add_argument(
        "--slow-link",
        action="append",
        default=[],
        metavar="NODE:NODE:FACTOR",
        help="messages between these nodes take FACTOR times as long (repeatable)",
    )
    parser.add_argument(
        "--lose-device",
        action="append",
        default=[],
        metavar="NODE:INDEX",
        help="plan anew without this GPU, or NODE without all of its GPUs, and rehearse that plan",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write both timelines")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the processes wrote")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Rehearse and report."""
    slow_ranks = dict(_slow_rank(text) for text in arguments.slow_rank)
    slow_links = [_slow_link(text) for text in arguments.slow_link]
    # Fail on places that take no file before minutes of rehearsing.
    if arguments.trace is not None:
        check_writable(arguments.trace)
    # Dealt sequences have a run and a report of their own.
    if arguments.sequences is not None:
        sequences = importlib.import_module("megatron_hetero.cli.rehearse_sequences")
        code: int = sequences.rehearse_sequences(arguments, output, slow_ranks, slow_links)
        return code
    if arguments.plan is None and arguments.layout is None:
        raise UsageError("give PLAN.JSON or --layout LINE, the plan to rehearse")
    found = read_plan_on_cluster(arguments)
    # The same job, planned anew on what is left.
    if arguments.lose_device:
        found = without_devices(found, tuple(arguments.lose_device))
    require_runtime()
    # Both sides leave these terms out, so that they stay comparable.
    if found.cluster.without_link_terms is not found.cluster:
        output.show(
            "Rehearsed, and predicted here, without the reduce_bandwidth and incast of the links."
        )
    # Ranks are forked, which CUDA does not survive; they are CPU's from the first import on.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    command = importlib.import_module("megatron_hetero.lab.rehearse.command")
    with output.progress("rehearsing") as on_progress:
        rehearsal = command.rehearse_plan(
            found.plan,
            found.cluster,
            found.profile,
            steps=arguments.steps,
            time_scale=arguments.time_scale,
            slow_ranks=slow_ranks,
            slow_links=slow_links,
            keep=arguments.keep,
            on_progress=on_progress,
        )
    # Judge the error against the limit, and write the timelines.
    data: dict[str, Any] = command.rehearsal_to_data(rehearsal, found.plan)
    data["limit"] = arguments.limit
    data["ok"] = abs(data["error"]) <= arguments.limit
    data["lost_devices"] = list(arguments.lose_device)
    if arguments.trace:
        stages = [stage for replica in rehearsal.stages for stage in replica]
        write_json(
            arguments.trace,
            chrome_trace(
                {"predicted": rehearsal.predicted.timelines, "rehearsed": stages},
                {"predicted": rehearsal.predicted.messages, "rehearsed": rehearsal.messages},
            ),
        )
    output.show(rehearsal_report(data))
    if arguments.trace:
        output.show(f"Timelines written to {arguments.trace}; open them in ui.perfetto.dev")
    if arguments.json:
        output.json(data)
    return 0 if data["ok"] else 1


def without_devices(found: PlanOnCluster, lost: tuple[str, ...]) -> PlanOnCluster:
    """Plan the same job anew on what is left of the cluster.

    Raises:
        UsageError: a name is neither a GPU nor a node of the cluster.
        InfeasibleError: nothing that is left can train the model.
    """
    cluster, workload = found.cluster, found.plan.workload
    names = {device.name for device in cluster.devices} | set(cluster.machines)
    for name in lost:
        if name not in names:
            raise UsageError(
                f"--lose-device {name}: the cluster has no such GPU or node; name one of "
                f"{', '.join(sorted(names))}"
            )
    # The planner takes lost devices for devices that are to stay idle.
    limits = replace(cluster.limits, idle_devices=(*cluster.limits.idle_devices, *lost))
    left = cluster.limited(limits)
    if workload is None:  # `read_plan_on_cluster` sees to it
        raise UsageError("the plan carries no model")
    plan, _ = plan_and_explain(left, workload, profile=found.profile)
    return PlanOnCluster(plan, left, found.profile)


def _slow_rank(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    try:
        return int(rank), _positive(factor)
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"--slow-rank {text}: write RANK:FACTOR, for example 2:1.5") from None


def _slow_link(text: str) -> tuple[str, str, float]:
    parts = text.split(":")
    try:
        a, b, factor = parts
        return a, b, _positive(factor)
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(
            f"--slow-link {text}: write NODE:NODE:FACTOR, for example a100-0:rtx-0:2"
        ) from None


def _positive(text: str) -> float:
    value = number(float, text, "a number")
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
