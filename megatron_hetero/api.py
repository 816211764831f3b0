"""The Python interface: plan, simulate and apply, in few names that stay.

    from megatron_hetero.api import load_cluster, plan, simulate

    best = plan(load_cluster("cluster.yaml"), "pretrain.sh")
    print(best.layout, simulate(best, load_cluster("cluster.yaml")).step_time_s)

These names and their parameters are kept by a test; what lies deeper in the package may change.
Only `apply` needs torch and Megatron.  (The names are here and not in `megatron_hetero` itself,
whose `plan` is the folder of that name.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.errors import HeteroError, UsageError
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.api import plan_and_explain
from megatron_hetero.planner.request import PLUGIN_GAIN
from megatron_hetero.planner.restrictions.precision import in_best_precision
from megatron_hetero.schedule.simulator.step import StepSimulation, simulate_plan

__all__ = [
    "Cluster",
    "HeteroError",
    "Plan",
    "StepSimulation",
    "apply",
    "load_cluster",
    "load_plan",
    "plan",
    "save_plan",
    "simulate",
]


def plan(
    cluster: Cluster,
    model: Path | str,
    megatron_args: Sequence[str] = (),
    *,
    profile: Path | str | None = None,
) -> Plan:
    """Find the best plan for training a model on a cluster, as the verb `plan` does; it fits and
    is validated.

    A job that names no precision is planned in one that its GPUs have
    (`planner.restrictions.precision`).  A plan that needs the plug-in gives way to the best of
    stock Megatron where it gains no more than 2 % over that.

    Args:
        cluster: of `load_cluster`.
        model: a Megatron script, a file of flags or a Hugging Face `config.json`.
        megatron_args: Megatron flags beside it, which win.
        profile: a `profile.json` of measured times.
    Raises:
        HeteroError: a file is not valid, or no plan fits (`exit_code` 3); the message says why.
    """
    _check(cluster, Cluster, "load_cluster")
    if isinstance(megatron_args, str) or not all(isinstance(word, str) for word in megatron_args):
        raise UsageError(
            'megatron_args are words, each a string of its own: ["--num-layers", "32"]'
        )
    workload = load_workload(model, megatron_args)
    # `in_best_precision` calls the search for each precision that may be chosen.
    search = partial(
        plan_and_explain,
        cluster,
        profile=load_profile(profile) if profile else None,
        plugin_gain=PLUGIN_GAIN,
    )
    return in_best_precision(search, itemgetter(0), cluster, workload).found[0]


def simulate(plan: Plan, cluster: Cluster, *, profile: Path | str | None = None) -> StepSimulation:
    """Simulate one step of a plan, event by event: times of each stage, link and device, memory
    over time.

    Args:
        plan: with devices of `cluster` and a workload, as `plan` makes it.
        profile: a `profile.json` of measured times.
    Raises:
        HeteroError: the plan names no devices of this cluster, or no model.
    """
    _check(plan, Plan, "load_plan")
    _check(cluster, Cluster, "load_cluster")
    return simulate_plan(plan, cluster, profile=load_profile(profile) if profile else None)


def apply(
    plan: Plan,
    parse_and_validate_args: Callable[..., Any],
    gpt_config_from_args: Callable[..., Any],
    pretrain: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Put the three functions that a pre-training script takes from Megatron on a plan.

    Call what comes back in the place of Megatron's own; the command line (`sys.argv`) holds the
    other flags.  Needs torch and Megatron, and the processes that the plan asks for.

    Args:
        plan: the plan to train on.
        parse_and_validate_args: of `megatron.training.arguments`.
        gpt_config_from_args: of `megatron.training.argument_utils`.
        pretrain: of `megatron.training`.
    Raises:
        HeteroError: the flags contradict the plan, or the processes are not those it asks for.
    """
    # Here and not above: importing this module must not need torch.
    from megatron_hetero.runtime.job.hook import on_plan

    _check(plan, Plan, "load_plan")
    return on_plan(plan, parse_and_validate_args, gpt_config_from_args, pretrain)


def _check(given: object, kind: type, loader: str) -> None:
    """Refuse the path of a file in the place of what it holds.

    Raises:
        UsageError: it is no `kind`; the message names the function that reads one.
    """
    if not isinstance(given, kind):
        name = type(given).__name__
        raise UsageError(f"give a {kind.__name__}, as {loader}(path) returns it, and no {name}")
