"""`launch --hetero-on-loss replan`: a start that goes on without the machines that it loses."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.flags.launchers.replanning import OnLoss
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan


def add_loss_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--hetero-on-loss` and its arguments."""
    group = parser.add_argument_group("lost machines")
    group.add_argument(
        "--hetero-on-loss",
        choices=("stop", "replan"),
        default="stop",
        help="replan: start.sh plans for the machines that are left (`plan --near`) and goes on "
        "from the newest checkpoint; with --for ssh and --cluster (default: stop)",
    )
    group.add_argument(
        "--cluster", type=Path, metavar="CLUSTER.YAML", help="all machines, to plan again for"
    )
    group.add_argument(
        "--profile", type=Path, metavar="PROFILE.JSON", help="measurements to plan again from"
    )


def replanning_of(arguments: argparse.Namespace, plan: Plan) -> OnLoss | None:
    """Return how the job of a command line goes on without lost machines; None if it does not.

    Raises:
        UsageError: the launcher watches over nothing, or the cluster is missing.
        HeteroError: the cluster or the profile cannot be read, or the plan is of other machines.
    """
    if arguments.hetero_on_loss == "stop":
        if arguments.cluster is not None or arguments.profile is not None:
            raise UsageError("--cluster and --profile go with --hetero-on-loss replan")
        return None
    # Only a start that sees all machines can go on without some of them.
    if not LAUNCHERS[arguments.launcher].can_replan:
        able = " or ".join(name for name, launcher in LAUNCHERS.items() if launcher.can_replan)
        raise UsageError(
            f"--hetero-on-loss replan with --for {arguments.launcher}: only --for {able} writes "
            "what watches over all machines; elsewhere plan again by hand (`plan --near`)"
        )
    if arguments.cluster is None:
        raise UsageError(
            "--hetero-on-loss replan needs --cluster CLUSTER.YAML: the machines to plan again for"
        )
    # Both files are read now, because a lost machine is no time for a typing error.
    if arguments.profile is not None:
        load_profile(arguments.profile)
    cluster = load_cluster(arguments.cluster)
    validate_plan(plan, cluster, str(arguments.plan))
    return OnLoss.on(cluster, has_profile=arguments.profile is not None)
