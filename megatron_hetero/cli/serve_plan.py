"""`megatron-hetero serve-plan`: which replicas serve which requests on a cluster of unlike GPUs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import get_args

from megatron_hetero.cli.output import Output
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import UsageError
from megatron_hetero.files import check_writable, write_text
from megatron_hetero.report.page.serving import serving_page
from megatron_hetero.report.text.serving import change_lines, serving_tables
from megatron_hetero.serving.fleet.api import planned_fleet
from megatron_hetero.serving.fleet.file import (
    load_serving_plan,
    save_serving_plan,
    serving_plan_data,
)
from megatron_hetero.serving.fleet.plan import Goal
from megatron_hetero.serving.fleet.story import story_of
from megatron_hetero.serving.fleet.unserved import (
    beyond_positions,
    not_stored,
    unread_limits,
)
from megatron_hetero.serving.prices.engine import EngineName
from megatron_hetero.serving.prices.profile_file import read_measured_steps
from megatron_hetero.serving.prices.served import KvFormat, WeightFormat, load_served
from megatron_hetero.serving.replan import (
    LOAD_BYTES_PER_S,
    compare_plans,
    part_going,
    replicas_left,
)
from megatron_hetero.serving.workload.load import load_request_mix
from megatron_hetero.units import parse_bandwidth, parse_time_span

DESCRIPTION = """\
Choose the replicas that serve a model: their shapes, their GPUs, which of them
prefill, decode or do both, and which requests go where.  The answer has a bound,
and a simulated run says what requests wait.

  megatron-hetero serve-plan --cluster cluster.yaml --model DIR \\
      --workload workload.yaml -o serve.json
  megatron-hetero serve-plan ... --goal cost
  megatron-hetero launch serve.json --for vllm -o fleet

With --from, the new plan is compared with the one that runs: what stays, what
moves, and whether the reload pays until things change again."""
TAKES_MEGATRON_FLAGS = False
STABLE = "1 h"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `serve-plan`."""
    parser.add_argument(
        "--cluster", type=Path, required=True, metavar="CLUSTER.YAML", help="the machines"
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR",
        help="a folder with a Hugging Face config.json, that file, or a file of Megatron flags",
    )  # fmt: skip
    parser.add_argument(
        "--workload", type=Path, required=True, metavar="WORKLOAD.YAML", help="the requests"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="SERVE.JSON", help="the plan")
    parser.add_argument(
        "--goal", choices=get_args(Goal), default="throughput",
        help="most requests in rates; least cost with deadlines kept; most requests with deadlines "
        "kept (default: throughput)",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, metavar="PRICE", help="most that an hour may cost")
    parser.add_argument(
        "--engine", choices=get_args(EngineName), default="vllm",
        help="that runs the replicas; any: also pipelines of unlike widths, which none runs "
        "(default: vllm)",
    )  # fmt: skip
    parser.add_argument(
        "--weights", choices=get_args(WeightFormat),
        help="format of the layers' matrices (default: the checkpoint's, as config.json has it)",
    )  # fmt: skip
    parser.add_argument(
        "--kv", choices=get_args(KvFormat), default="16-bit",
        help="format of the KV cache (default: 16-bit)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=Path, nargs="+", default=[], metavar="FILE",
        help="steps that you measured, which win over tables: CSV, or the JSON of vllm bench serve",
    )  # fmt: skip
    parser.add_argument(
        "--gap", type=float, default=0.005, metavar="PART",
        help="relative distance from the bound at which the search stops (default: 0.005)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of simulated arrivals (default: 0)")
    parser.add_argument(
        "--compare-engines", action="store_true",
        help="also say what pipelines of unlike widths would gain",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="running", type=Path, metavar="SERVE.JSON",
        help="the plan that runs: compare the new one with it",
    )  # fmt: skip
    parser.add_argument(
        "--stable", metavar="TIME",
        help=f"with --from: time until things change again (default: {STABLE})",
    )  # fmt: skip
    parser.add_argument(
        "--load-bandwidth", metavar="BANDWIDTH",
        help="with --from: at which a replica reads its weights (default: 1 GB/s)",
    )  # fmt: skip
    parser.add_argument(
        "--html", type=Path, metavar="PAGE.HTML",
        help="also write a page: who serves what, a simulated minute, what other deadlines cost",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Plan, print and write."""
    if not 0 <= arguments.gap < 1:
        raise UsageError(f"--gap {arguments.gap} is not between 0 and 1; write 0.005 for 0.5 %")
    if arguments.budget is not None and not 0 < arguments.budget < inf:
        raise UsageError(f"--budget {arguments.budget} buys nothing; give a price above 0")
    for option in ("load_bandwidth", "stable"):
        if getattr(arguments, option) is not None and arguments.running is None:
            raise UsageError(f"--{option.replace('_', '-')} goes with --from")
    # Options and files are read before the search, so that a fault shows at once.
    stable_s = parse_time_span(arguments.stable or STABLE)
    load_bytes_per_s = (
        parse_bandwidth(arguments.load_bandwidth) if arguments.load_bandwidth else LOAD_BYTES_PER_S
    )
    for path in filter(None, (arguments.output, arguments.html)):
        check_writable(path)
    running = load_serving_plan(arguments.running) if arguments.running else None
    cluster = load_cluster(arguments.cluster)
    served = load_served(arguments.model, arguments.weights, arguments.kv)
    mix = load_request_mix(arguments.workload)
    for note in (
        *unread_limits(cluster.limits),
        *not_stored(served),
        *beyond_positions(served, mix),
    ):
        output.note(note)
    measured = read_measured_steps(arguments.profile, {n.gpu_type.name for n in cluster.nodes})
    with output.progress("composing and simulating"):
        plan, fleet, found = planned_fleet(
            cluster,
            served,
            mix,
            arguments.goal,
            arguments.engine,
            arguments.budget or inf,
            arguments.gap,
            arguments.seed,
            arguments.compare_engines,
            measured,
        )
    # Compare with the running fleet: its rates count for the replicas whose GPUs are still there.
    change = None
    if running is not None:
        old_rate = sum(c.rate_per_s for c in running.classes)
        new_rate = sum(c.rate_per_s for c in plan.classes)
        part = part_going(running, replicas_left(running, cluster))
        # Scales are multiples of the workload's rates, which may have changed.
        scale = running.scale * part * old_rate / new_rate
        change = compare_plans(running, plan, stable_s, load_bytes_per_s, scale)
    # Save the plan and answer.
    if arguments.output is not None:
        save_serving_plan(plan, arguments.output)
    if arguments.html is not None:
        with output.progress("simulating a minute"):
            story = story_of(fleet, found, plan.budget_per_hour or inf, arguments.seed)
        write_text(arguments.html, serving_page(plan, story))
    if arguments.json:
        data = serving_plan_data(plan)
        output.json(data if change is None else {**data, "change": asdict(change)})
        return 0
    output.show(*serving_tables(plan))
    if change is not None:
        output.show(*change_lines(change))
    if arguments.output is not None:
        output.show(f"Plan written to {arguments.output}")
    if arguments.html is not None:
        output.show(f"Page written to {arguments.html}")
    return 0
