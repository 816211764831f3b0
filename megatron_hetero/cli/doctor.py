"""`megatron-hetero doctor`: faults that would hang the job or train wrongly, before it starts."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_hetero.cli.arguments import number
from megatron_hetero.cli.output import Output
from megatron_hetero.cli.unread import MEGATRON_FLAGS, refuse_unread
from megatron_hetero.cli.verify import missing_modules, require_runtime
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile, load_profile
from megatron_hetero.errors import UsageError
from megatron_hetero.model.script import OF_LIBRARIES
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.preflight.check import (
    check_figures,
    check_fit,
    check_plan_on_cluster,
    errors_first,
)
from megatron_hetero.preflight.finding import Finding, has_errors
from megatron_hetero.preflight.job import make_job
from megatron_hetero.preflight.start import StartAnswer, ask_megatron, why_not_to_ask
from megatron_hetero.report.text.trials.kit import kit_report
from megatron_hetero.report.text.trials.preflight import preflight_report
from megatron_hetero.serving.checks import check_fleet
from megatron_hetero.serving.fleet.file import is_serving_plan, load_serving_plan

DESCRIPTION = """\
Check a plan, its cluster and the flags for faults that would stop the job, hang
it or make it train wrongly: precision and kernels of each GPU, NCCL's settings,
addresses, memory.  Each finding says what, where and what to set.  Run as every
process of the launch, with --on-cluster, it also checks the machines: versions,
free memory, and known values sent through every group of the plan, within a time
limit.  Megatron flags that `launch` will get beside the plan's may follow after --.

  megatron-hetero doctor plan.json --cluster cluster.yaml
  torchrun <as `flags` prints it> -m megatron_hetero doctor plan.json \\
      --cluster cluster.yaml --on-cluster

With --train it needs no plan: small GPTs are trained on this machine, asymmetric
plans beside one process of stock Megatron, memory and step beside the prediction,
the runtime beside stock Megatron; on GPUs, or without them on the CPU over gloo.
It leaves a report and a profile.json.

  megatron-hetero doctor --train

Exit code 0: no errors (there may be warnings); 1: errors."""
TAKES_MEGATRON_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doctor`."""
    parser.add_argument("plan", type=Path, nargs="?", metavar="PLAN.JSON", help="the plan")
    parser.add_argument("--cluster", type=Path, metavar="CLUSTER.YAML", help="the machines")
    parser.add_argument(
        "--profile", type=Path, metavar="PROFILE.JSON", help="measurements to predict from"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="[MACHINE:]NAME=VALUE",
        help="a variable that the job will have, beside those that `flags` prints; repeat it",
    )
    parser.add_argument(
        "--no-megatron",
        action="store_true",
        help="leave out the question to Megatron's own checks, which takes some seconds",
    )
    parser.add_argument(
        "--on-cluster",
        action="store_true",
        help="look at the machines too; run by torchrun, one process for each GPU",
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="for each exchange of values, with --on-cluster (default: 30)",
    )
    parser.add_argument(
        "--train",
        action="store_true",
        help="try the runtime on this machine with small models, without a plan",
    )
    parser.add_argument(
        "--short", action="store_true", help="with --train: one plan beside one process alone"
    )
    parser.add_argument(
        "--gpu", metavar="TYPE", help="with --train: the GPU's name, where the driver's is unknown"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("doctor"), metavar="FOLDER",
        help="with --train: for report.json, profile.json and the logs of the runs "
        "(default: doctor)",
    )  # fmt: skip
    parser.add_argument("--plant", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


_OF_PLANS = ("plan", "cluster", "profile", MEGATRON_FLAGS, "json", "no_megatron")
_OF_FILES = (*_OF_PLANS, "env")
_OF_MACHINES = (*_OF_PLANS, "on_cluster", "time_limit")
_OF_FLEETS = ("plan", "cluster", "json")
_OF_TRAINING = ("train", "short", "gpu", "output", "plant", "json")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Check, and print what was found."""
    # The kit brings models of its own; everything below needs a plan.
    if arguments.train:
        return _run_training(arguments, output)
    if arguments.plan is None or arguments.cluster is None:
        raise UsageError(
            "doctor looks at a plan on its cluster: give PLAN.JSON and --cluster CLUSTER.YAML; "
            "or --train, to try the runtime on this machine without a plan"
        )
    # A serving plan has neither ranks nor Megatron's flags.
    if is_serving_plan(arguments.plan):
        return _run_on_fleet(arguments, output)
    # Flags behind `--` are those that `launch` will add.
    plan = _with_flags(load_plan(arguments.plan), arguments.megatron_args)
    cluster = load_cluster(arguments.cluster)
    profile = load_profile(arguments.profile) if arguments.profile else None
    settings = arguments.env
    if arguments.on_cluster:
        # Each process of the launch has its own environment to look at.
        if settings:
            raise UsageError(
                "--env is for a look at the files alone; set the variable on the machine"
            )
        refuse_unread(arguments, add_arguments, _OF_MACHINES, "--on-cluster trains nothing")
        return _run_on_cluster(plan, cluster, profile, arguments, output)
    what = "without --on-cluster and --train the files alone are looked at"
    refuse_unread(arguments, add_arguments, _OF_FILES, what)
    findings = check_plan_on_cluster(plan, cluster, settings, profile)
    # Last, because Megatron's imports take some seconds.
    answer = _megatrons_answer(plan, cluster, settings, findings, arguments, output)
    findings = errors_first((*findings, *answer.findings))
    looked_at = f"{_size(plan)}, not at the machines (--on-cluster); {_asked(answer)}"
    _print(findings, looked_at, arguments.json, output, _asked_data(answer))
    return 1 if has_errors(findings) else 0


def _megatrons_answer(
    plan: Plan,
    cluster: Cluster,
    environment: Sequence[str],
    findings: Sequence[Finding],
    arguments: argparse.Namespace,
    output: Output,
) -> StartAnswer:
    """Ask Megatron about the job's start, if it is here and nothing was found that ends it."""
    if arguments.no_megatron:
        return StartAnswer(because="--no-megatron")
    missing = missing_modules()
    because = f"{missing[0]} is not installed here" if missing else why_not_to_ask(findings)
    if because is not None:
        return StartAnswer(because=because)
    with output.progress("asking Megatron"):
        return ask_megatron(make_job(plan, cluster, environment))


def _asked(answer: StartAnswer) -> str:
    if answer.release is None:
        return f"Megatron was not asked ({answer.because})"
    return f"asked Megatron {answer.release}"


def _asked_data(answer: StartAnswer) -> dict[str, Any]:
    return {"megatron": {"release": answer.release, "because": answer.because or None}}


def _run_on_fleet(arguments: argparse.Namespace, output: Output) -> int:
    """Check a serving plan, from its files alone."""
    what = f"{arguments.plan} is a serving plan, of which doctor reads the files alone"
    refuse_unread(arguments, add_arguments, _OF_FLEETS, what)
    fleet = load_serving_plan(arguments.plan)
    findings = check_fleet(fleet, load_cluster(arguments.cluster))
    _print(findings, f"{len(fleet.replicas)} replicas", arguments.json, output)
    return 1 if has_errors(findings) else 0


def _run_training(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.plan or arguments.cluster or arguments.megatron_args or arguments.on_cluster:
        raise UsageError(
            "--train trains models of its own: give it no plan, no --cluster, no --on-cluster and "
            "no Megatron flags (`verify` trains a plan's)"
        )
    refuse_unread(arguments, add_arguments, _OF_TRAINING, "--train trains models of its own")
    require_runtime()
    # Before Megatron, which looks for Transformer Engine once; on a GPU nothing is to be provided.
    importlib.import_module("megatron_hetero.runtime.transformer_engine.layers").provide()
    command = importlib.import_module("megatron_hetero.lab.kit.command")
    request = command.KitRequest(arguments.output, arguments.gpu, arguments.short, arguments.plant)
    with output.progress("training") as on_progress:
        data: dict[str, Any] = command.examine(request, on_progress)
    output.show(kit_report(data))
    if arguments.json:
        output.json(data)
    return 0 if data["ok"] else 1


def _run_on_cluster(
    plan: Plan,
    cluster: Cluster,
    profile: Profile | None,
    arguments: argparse.Namespace,
    output: Output,
) -> int:
    require_runtime()
    # Before ranks wait for each other: a plan that cannot start.
    unfit = check_fit(plan, cluster)
    if unfit:
        # Every process of the launch finds the same: one of them says it.
        if os.environ.get("RANK", "0") == "0":
            _print(unfit, f"{_size(plan)}, not at the machines", arguments.json, output)
        return 1
    command = importlib.import_module("megatron_hetero.lab.doctor.command")
    outcome = command.examine_machines(plan, cluster, arguments.time_limit)
    # Figures come from the files, alike on all ranks; rank 0 prints.
    findings = errors_first((*check_figures(make_job(plan, cluster), profile), *outcome.findings))
    if outcome.rank == 0:
        # Its variables are the job's.
        own = [f"{n}={value}" for n, value in os.environ.items() if OF_LIBRARIES.fullmatch(n)]
        answer = _megatrons_answer(plan, cluster, own, findings, arguments, output)
        findings = errors_first((*findings, *answer.findings))
        looked_at = (
            f"{_size(plan)}, their machines and {len(outcome.tested)} groups; {_asked(answer)}"
        )
        data = {
            **_asked_data(answer),
            "machines": [fact.model_dump(mode="json") for fact in outcome.facts],
            "groups": list(outcome.tested),
        }
        _print(findings, looked_at, arguments.json, output, data)
    # A finding may mean a communicator that hangs, and the clean-up would hang too.
    code: int = command.leave(bool(outcome.findings), 1 if has_errors(findings) else 0)
    return code


def _print(
    findings: tuple[Finding, ...],
    looked_at: str,
    as_json: bool,
    output: Output,
    more: dict[str, Any] | None = None,
) -> None:
    if as_json:
        output.json(
            {
                "ok": not has_errors(findings),
                "findings": [asdict(finding) for finding in findings],
                **(more or {}),
            }
        )
        return
    output.show(preflight_report(findings, looked_at))


def _size(plan: Plan) -> str:
    num_nodes = len(plan.hosts)
    return (
        f"{plan.layout.num_devices} GPU{'s' if plan.layout.num_devices > 1 else ''} on "
        f"{num_nodes} machine{'s' if num_nodes > 1 else ''}"
    )


def _seconds(text: str) -> float:
    value = number(float, text, "a number")
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return value


def _with_flags(plan: Plan, more: tuple[str, ...]) -> Plan:
    """Return the plan with `more` flags behind the flags of its job."""
    if not more or plan.workload is None:
        return plan
    flags = (*plan.workload.megatron_args, *more)
    return replace(plan, workload=replace(plan.workload, megatron_args=flags))
