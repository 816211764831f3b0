"""`megatron-hetero simulate`: one step of a plan, event by event, without running anything."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.cli.plan_on_cluster import add_plan_arguments, read_plan_on_cluster
from megatron_hetero.cost.utilization import utilization_of
from megatron_hetero.files import write_json
from megatron_hetero.report.text.trials.simulation import simulation_report, simulation_to_data
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.simulator.trace import chrome_trace

DESCRIPTION = """\
Simulate one optimizer step of a plan: the computations of every GPU, the messages
on every link, the gradient exchange, the optimizer, and the memory in use at
every moment.  The order is the one that the runtime executes; messages of all
replicas share the links of the cluster.  Needs no GPU and no torch.

  megatron-hetero simulate plan.json --cluster cluster.yaml --trace step.json
  megatron-hetero simulate --layout "tp1:20,tp2:12 @8" --cluster cluster.yaml --model gpt.sh"""
TAKES_MEGATRON_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `simulate`."""
    add_plan_arguments(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the timeline for ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Simulate and report."""
    found = read_plan_on_cluster(arguments)
    simulation = simulate_plan(found.plan, found.cluster, profile=found.profile)
    if arguments.trace:
        write_json(
            arguments.trace,
            chrome_trace({"simulated": simulation.timelines}, {"simulated": simulation.messages}),
        )
    # By the simulated step, not by the plan's own estimate.
    utilization = utilization_of(found.plan, found.cluster, simulation.step_time_s)
    if arguments.json:
        data = simulation_to_data(simulation)
        data["utilization"] = utilization and asdict(utilization)
        output.json(data)
        return 0
    output.show(simulation_report(simulation, utilization))
    if arguments.trace:
        output.show(f"Timeline written to {arguments.trace}; open it in ui.perfetto.dev")
    return 0
