"""Arguments that `simulate` and `rehearse` share: a plan or a layout, and the cluster it is on."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hetero.cli.arguments import add_model_argument, add_sends_argument, with_sends
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile, load_profile
from megatron_hetero.errors import UsageError
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout, parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.plan.plan import Plan


@dataclass(frozen=True)
class PlanOnCluster:
    """A plan with devices and a workload, valid on its cluster; `profile` if one was named."""

    plan: Plan
    cluster: Cluster
    profile: Profile | None


def add_plan_arguments(parser: argparse.ArgumentParser, *, needs_plan: bool = True) -> None:
    """Declare the plan, the cluster and the profile."""
    source = parser.add_mutually_exclusive_group(required=needs_plan)
    source.add_argument("plan", type=Path, nargs="?", metavar="PLAN.JSON", help="the plan")
    source.add_argument(
        "--layout",
        metavar="LINE",
        help='for example "tp2:3,tp1:1 @4"; takes the GPUs of the cluster in order, and the model '
        "from --model or Megatron's flags",
    )
    parser.add_argument(
        "--cluster", type=Path, required=True, metavar="CLUSTER.YAML", help="the machines"
    )
    add_model_argument(parser, "of a layout, as `plan` has it")
    parser.add_argument(
        "--profile", type=Path, metavar="PROFILE.JSON", help="measured times of the model's blocks"
    )
    add_sends_argument(parser, "the plan's own")


def read_plan_on_cluster(arguments: argparse.Namespace) -> PlanOnCluster:
    """Read the plan of a command line, on its cluster.

    Raises:
        UsageError: plan, layout and model do not go together.
        HeteroError: a file is invalid, or the plan is not for this cluster.
    """
    cluster = load_cluster(arguments.cluster)
    profile = load_profile(arguments.profile) if arguments.profile else None
    # A layout has neither devices nor a model: devices in order, the model from the flags.
    if arguments.layout is not None:
        layout = parse_layout(arguments.layout)
        workload = load_workload(
            arguments.model, arguments.megatron_args, environment=dict(arguments.model_env)
        )
        workload = with_sends(workload, arguments.sends)
        plan = replace(plan_from_layout(layout, workload), workload=workload)
        return PlanOnCluster(place_in_order(plan, cluster), cluster, profile)
    plan = load_plan(arguments.plan)
    if plan.workload is None:
        raise UsageError(
            f"{arguments.plan} does not say which model it is for; use "
            f"--layout '{format_layout(plan.layout)}' with --model FILE or Megatron's flags"
        )
    if arguments.model is not None or arguments.model_env or arguments.megatron_args:
        raise UsageError(
            f"{arguments.plan} says which model it is for; --model, --model-env and Megatron flags "
            "go with --layout"
        )
    # Figures of the file are dropped, since sends or cluster may be others now.
    plan = replace(plan, workload=with_sends(plan.workload, arguments.sends), estimates=None)
    plan = place_in_order(plan, cluster)
    validate_plan(plan, cluster, str(arguments.plan))
    return PlanOnCluster(plan, cluster, profile)
