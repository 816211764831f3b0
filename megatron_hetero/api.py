"""The Python interface: plan, simulate and apply, in few names that stay.

    from megatron_hetero.api import load_cluster, plan, simulate

    best = plan(load_cluster("cluster.yaml"), "pretrain.sh")
    print(best.layout, simulate(best, load_cluster("cluster.yaml")).step_time_s)

These names and their parameters are kept by a test; what lies deeper in the package may change.
Only `apply` needs torch and Megatron.  (The names are here and not in `megatron_hetero` itself,
whose `plan` is the folder of that name.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file import description
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.errors import HeteroError, UsageError
from megatron_hetero.flags.emit import check_user_flags
from megatron_hetero.flags.notes import refused_words, unread_lines, unread_parts
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan import file as plan_file
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.explain import Explanation
from megatron_hetero.planner.api import plan_and_explain
from megatron_hetero.planner.request import PLUGIN_GAIN
from megatron_hetero.planner.restrictions.measured_sizes import (
    HeldCluster,
    held_to_measured_sizes,
    profile_words,
)
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


def load_cluster(path: Path | str) -> Cluster:
    """Read a cluster.yaml.

    Raises:
        HeteroError: the file is not there or not valid; the message has the line and the key.
    """
    return description.load_cluster(_file(path))


def load_plan(path: Path | str) -> Plan:
    """Read and validate a plan.json.

    Raises:
        HeteroError: the file is not there, or is no valid plan.
    """
    return plan_file.load_plan(_file(path))


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan.json, whole or not at all; equal plans give equal bytes.

    Raises:
        HeteroError: the file cannot be written, or this is no plan, or one that breaks an invariant
            and that `load_plan` would refuse.
    """
    _check_plan(plan)
    plan_file.save_plan(plan, _file(path))


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
    stock Megatron where it gains no more than 2 % over that.  What the verb says against the plan,
    this warns of (`UserWarning`): parts of the script are not known and may change the model, the
    job's start would refuse a flag, the profile lacks the model or cannot be right, the search was
    interrupted (Ctrl-C gives the best plan found so far, if there is one).

    Args:
        cluster: of `load_cluster`.
        model: a Megatron script, a file of flags or a Hugging Face `config.json`.
        megatron_args: Megatron flags beside it, which win.
        profile: a `profile.json` of measured times.
    Raises:
        HeteroError: a file is not valid, or no plan fits (`exit_code` 3); the message says why.
    """
    _check(cluster, Cluster, "load_cluster")
    workload = load_workload(_file(model), _words(megatron_args))
    check_user_flags(workload.megatron_args)
    measured = None if profile is None else load_profile(_file(profile))

    # `in_best_precision` calls the search for each precision that may be chosen.
    def search(job: Workload) -> tuple[Plan, Explanation, HeldCluster]:
        held = held_to_measured_sizes(cluster, job, measured)
        found = plan_and_explain(held.cluster, job, profile=measured, plugin_gain=PLUGIN_GAIN)
        return *found, held

    best, explanation, held = in_best_precision(search, itemgetter(0), cluster, workload).found
    job = best.workload or workload
    words = (held.words, *profile_words(held.cluster, job, measured), *map(str, cluster.doubts))
    _warn((*words, *_reasons(best, explanation)))
    return best


def simulate(plan: Plan, cluster: Cluster, *, profile: Path | str | None = None) -> StepSimulation:
    """Simulate one step of a plan, event by event: times of each stage, link and device, memory
    over time.

    Args:
        plan: with devices of `cluster` and a workload, as `plan` makes it.
        profile: a `profile.json` of measured times.
    Raises:
        HeteroError: the plan names no devices of this cluster, or no model, or breaks an invariant.
    """
    _check_plan(plan)
    _check(cluster, Cluster, "load_cluster")
    measured = None if profile is None else load_profile(_file(profile))
    return simulate_plan(plan, cluster, profile=measured)


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

    _check_plan(plan)
    return on_plan(plan, parse_and_validate_args, gpt_config_from_args, pretrain)


def _check(given: object, kind: type, loader: str) -> None:
    """Refuse the path of a file in the place of what it holds.

    Raises:
        UsageError: it is no `kind`; the message names the function that reads one.
    """
    if not isinstance(given, kind):
        name = type(given).__name__
        raise UsageError(f"give a {kind.__name__}, as {loader}(path) returns it, and no {name}")


def _check_plan(given: Plan) -> None:
    """Refuse what is no plan, and a plan that a program has changed into an invalid one.

    Raises:
        HeteroError: the message says what is wrong.
    """
    _check(given, Plan, "load_plan")
    validate_plan(given)


def _reasons(found: Plan, explanation: Explanation) -> Iterator[str]:
    """Yield the reasons for which the verb `plan` would not end with exit code 0."""
    if explanation.interrupted:
        yield "interrupted: this is the best plan found so far"
    unread = [part for part in unread_parts(found) if part.may_change_model]
    if unread:
        lines = "\n".join(unread_lines(unread))
        yield (
            f"not all of the script is known, and what is not may change the model:\n{lines}\n"
            'Say the arguments of the script in model ("run.sh ARGUMENT"), write the values into '
            "it, or give the flags as megatron_args."
        )
    yield refused_words(found, explanation.best_stock is not None)


def _warn(words: Iterable[str]) -> None:
    """Warn of all that there is to say, in the name of the caller of `plan`."""
    for line in filter(None, words):
        warnings.warn(line, stacklevel=3)


def _words(given: object) -> Sequence[str]:
    """Return the words of a command line.

    Raises:
        UsageError: an iterator, which is empty after one look; a dict or a set, which lose words or
            their order; a whole line; or words that are no text.
    """
    if (
        isinstance(given, Sequence)
        and not isinstance(given, str | bytes)
        and all(isinstance(word, str) for word in given)
    ):
        return given
    raise UsageError(
        'megatron_args are a list of words, each a string of its own: ["--num-layers", "32"]'
    )


def _file(given: object) -> Path | str:
    """Return what names a file.

    Raises:
        UsageError: it is no path, or none that a system takes.
    """
    if not isinstance(given, str | Path) or not given or "\0" in str(given):
        raise UsageError(f"give the path of a file, as a string or a Path, and not {given!r:.80}")
    return given
