"""`rehearse --sequences`: dealt steps on a cluster, on a plan or on every GPU by itself."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hetero.cli.output import Output
from megatron_hetero.cli.plan_on_cluster import read_plan_on_cluster
from megatron_hetero.cli.verify import require_runtime
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile, load_profile
from megatron_hetero.errors import UsageError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.report.text.trials.dealt_rehearsal import dealt_rehearsal_report
from megatron_hetero.sequences.lengths import read_lengths

_OF_PLANS = ("trace", "lose_device", "sends")


@dataclass(frozen=True)
class _AskedJob:
    """What is rehearsed; without a plan that is `asked` for every GPU is a replica."""

    cluster: Cluster
    workload: Workload
    asked: Plan | None
    profile: Profile | None


def rehearse_sequences(
    arguments: argparse.Namespace,
    output: Output,
    slow_ranks: Mapping[int, float],
    slow_links: Sequence[tuple[str, str, float]],
) -> int:
    """Rehearse dealt steps and report.

    Args:
        arguments: of `rehearse`.
        output: where to print.
        slow_ranks: rank -> factor by which it computes slower than predicted.
        slow_links: (node, node, factor by which messages are slower than described).
    Raises:
        UsageError: an option is for plans alone.
        InfeasiblePlanError: a sequence is longer than any group can hold.
    """
    # Options that a dealt step has no place for.
    for name in _OF_PLANS:
        if getattr(arguments, name, None):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --sequences yet")
    lengths = read_lengths(arguments.sequences)
    job = _read_job(arguments)
    require_runtime()
    command = importlib.import_module("megatron_hetero.lab.rehearse.dealt.command")
    with output.progress("rehearsing") as on_progress:
        data: dict[str, Any] = command.rehearse_sequences(
            job.cluster.without_link_terms,
            arguments.cluster,
            job.workload,
            job.asked,
            lengths,
            job.profile,
            steps=arguments.steps,
            time_scale=arguments.time_scale,
            slow_ranks=slow_ranks,
            slow_links=slow_links,
            keep=arguments.keep,
            on_progress=on_progress,
        )
    data["limit"] = arguments.limit
    data["ok"] = abs(data["error"]) <= arguments.limit
    output.show(dealt_rehearsal_report(data))
    if arguments.json:
        output.json(data)
    return 0 if data["ok"] else 1


def _read_job(arguments: argparse.Namespace) -> _AskedJob:
    # Every GPU is a replica of its own.
    if arguments.plan is None and arguments.layout is None:
        workload = load_workload(
            arguments.model, arguments.megatron_args, environment=dict(arguments.model_env)
        )
        profile = load_profile(arguments.profile) if arguments.profile else None
        return _AskedJob(load_cluster(arguments.cluster), workload, None, profile)
    found = read_plan_on_cluster(arguments)
    if found.plan.workload is None:  # `read_plan_on_cluster` sees to it
        raise UsageError("the plan carries no model")
    return _AskedJob(found.cluster, found.plan.workload, found.plan, found.profile)
